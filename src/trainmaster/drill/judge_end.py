"""Judgement of the end of a drilled run: whether it came to its last step, and whether its starts counted right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainmaster.core.results import Finding, error, fail, ok
from trainmaster.drill.lives import Resume
from trainmaster.drill.record import Attempt

HUNG = "ranks wait for each other: see whether all of them loaded the same step, and give collectives a timeout"
_COUNT = (
    "the number of the step and the state that are saved do not belong together, or one is added to (taken from) the "
    "number when it is loaded: save after optimizer.step(), with the number of steps that are done, and do exactly the "
    "rest: range(done, steps)"
)
_SEEMS = f"{_COUNT}. Where the loop counts batches, go on with the batch after those that were read"


def end(
    reference: Mapping[int, float],
    attempts: Sequence[Attempt],
    resumes: Sequence[Resume],
    *,
    steps: int,
    reached: int | None,
) -> Finding:
    """The last attempt ends well, at the last step of the undisturbed run. `reference`: that run's losses by step."""
    if reached is None or not attempts:
        return error("the last attempt was not reached", action="see the strikes that were not reached")
    last = attempts[-1]
    if last.hung:
        return fail(f"the last attempt hung at step {reached} of {steps} and was killed", action=HUNG)
    if set(last.codes) != {0}:
        return fail(
            f"the last attempt ended with {list(last.codes)}: {last.message}", action=f"see the logs in {last.folder}"
        )
    if reached == steps:
        return ok(f"the run came to step {reached}, its last, in {Path(last.folder).name}")
    if counted := _counted(reference, attempts, resumes):
        return fail(f"it did {reached} steps instead of {steps}: {counted}", action=_COUNT)
    if seems := _same_each_time(attempts, resumes, reached - steps):
        return fail(f"it did {reached} steps instead of {steps}: {seems}", action=_SEEMS)
    if reached < steps:
        return fail(f"the last attempt ended with 0 at step {reached} of {steps}", action=f"see {last.folder}")
    return fail(
        f"it did {reached} steps instead of {steps}: the loop does not count from the step at which it resumed",
        action="save the step (or epoch and batch) and go on from it: range(start, steps), not range(steps)",
    )


def is_miscounted(found: Finding) -> bool:
    """Whether this finding of `end` says that a start began to count at another step than that of its state."""
    return found.action == _COUNT


def may_be_miscounted(found: Finding) -> bool:
    """The same, or there are so many steps too many, or too few, that it may be so."""
    return found.action in (_COUNT, _SEEMS)


def _counted(reference: Mapping[int, float], attempts: Sequence[Attempt], resumes: Sequence[Resume]) -> str | None:
    """From which other step than that of its state the first such start counted on, as what it printed tells.

    The first one alone: what a later one loads was already saved under another number.
    """
    for attempt in attempts[1:]:
        printed = printed_start(attempt.losses, reference)
        resume = next((one for one in resumes if one.strike == attempt.before), None)
        # At 0 its counter began anew; and with gaps in what it printed, its first step is not known.
        whole = len(attempt.losses) == max(attempt.losses, default=0) - min(attempt.losses, default=0) + 1
        if not printed or not whole or resume is None or resume.restarted or not resume.start:
            continue
        if by := printed - resume.start:
            steps = f"{abs(by)} step{'s were' if abs(by) > 1 else ' was'}"
            return (
                f"after {attempt.before} it counted on from step {printed}, although its state is that after step "
                f"{resume.start}, so {steps} {'left out' if by > 0 else 'done a second time'}"
            )
    return None


def _same_each_time(attempts: Sequence[Attempt], resumes: Sequence[Resume], more: int) -> str | None:
    """Where not every step is printed: one or two steps too many, or too few, for each start from a checkpoint."""
    went_on = {one.strike for one in resumes if one.start and not one.restarted}
    starts = sum(attempt.before in went_on for attempt in attempts[1:])
    if not starts or more % starts or abs(more) > 2 * starts:
        return None
    each = abs(more) // starts
    what = "done a second time" if more > 0 else "left out"
    return f"{each} step{'s' * (each > 1)} {what} for each of {starts} starts from a checkpoint, it seems"


def printed_start(losses: Mapping[int, float], reference: Mapping[int, float]) -> int | None:
    """The step that an attempt went on from by what it printed; None where it does not print every step."""
    steps = sorted(reference)
    if not losses or not steps or steps != list(range(steps[0], steps[0] + len(steps))):
        return None
    return max(0, min(losses) - steps[0])
