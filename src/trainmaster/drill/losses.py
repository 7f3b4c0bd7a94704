"""Losses of a drill of any program: those after a resume beside the undisturbed run's, and what else must differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from trainmaster.core.results import Finding, error, fail, ok, warn
from trainmaster.drill.ground import Ground
from trainmaster.drill.lives import Resume
from trainmaster.drill.record import Attempt

_UNSEEN = 3  # steps that may be printed and not done: an optimizer is not stepped where gradients are infinite
_NOISE = 3.0  # times the difference of the two undisturbed runs: two runs show little of the spread


def judge_losses(
    reference: Mapping[int, float],
    attempts: Sequence[Attempt],
    resumes: Sequence[Resume],
    *,
    ground: Ground,
    noise: float | None,
    causes: Sequence[str],
) -> Finding:
    """Losses after a resume are those of the undisturbed run: bit-equal, or within its noise."""
    action = (
        f"it follows from: {', '.join(causes)}"
        if causes
        else "something that the witness does not see is not restored: state of the script's own, augmentation"
    )
    bound = 0.0 if ground.repeatable else _NOISE * (noise or 0.0)
    pairs = [
        (step, loss, reference[step])
        for attempt in attempts[1:]
        for step, loss in attempt.losses.items()
        if step in reference and not _is_of_a_bar(step, loss, attempt.losses, reference)
    ]
    wrong = [(step, loss, wanted) for step, loss, wanted in pairs if not near(loss, wanted, bound)]
    if wrong:
        step, loss, wanted = wrong[0]
        within = "" if ground.repeatable else f" (noise allows {bound:.3g})"
        words = (
            f"{len(wrong)} of {len(pairs)} losses after a resume are not those of the undisturbed run, first at step "
            f"{step}: {loss!r} instead of {wanted!r}{within}"
        )
        if not causes and (compared := _bit_equal(attempts[1:], resumes, ground)):
            return warn(
                f"{words}; weights, optimizer state and random numbers of all {compared} steps are bit-equal, so the "
                "printed loss is a mean over steps, or its counter restarts",
                action="print the loss of each step under the number of the step; if it is the loss of averaged "
                "weights, save and load those too",
            )
        return fail(words, action=action)
    steps = [
        (resume.base + number, line.weights == resume.reference[resume.base + number].weights)
        for resume in resumes
        for number, line in enumerate(resume.lines, 1)
        if resume.base + number in resume.reference
    ]
    if ground.repeatable and (moved := [step for step, same in steps if not same]):
        return fail(f"weights are not those of the undisturbed run from step {min(moved)} on", action=action)
    if not pairs and not (ground.repeatable and steps):
        return error("no losses were found in what it prints or writes", action="print step and loss of each step")
    if not ground.repeatable:
        return ok(f"{len(pairs)} losses after a resume within {bound:.3g} of the undisturbed run's")
    told = f"{len(pairs)} losses" if pairs else "no losses printed under one number each"
    return ok(f"{told}, and the weights of {len(steps)} steps after a resume, bit-equal", compared=len(pairs))


def judge_seen(attempts: Sequence[Attempt]) -> Finding | None:
    """Not more steps are printed than were seen: of the others nothing is known. None: it is so.

    A step that is made of several batches may be printed once a batch.
    """
    for attempt in attempts:
        lives = [life for life in attempt.lives if life.rank == 0] or attempt.lives[:1]
        batches = [len(line.batches) for life in lives for line in life.lines]
        printed, seen = len(attempt.losses), len(batches)
        each = max(1, statistics.median_low(batches)) if batches else 1
        if seen and printed - seen * each > max(_UNSEEN, seen * each // 20):
            return error(
                f"it printed losses of {printed} steps, and the witness saw {seen} optimizer steps: of the others "
                "nothing is known",
                action="step a torch.optim optimizer, not inside torch.compile, once in each step that is printed; "
                "where a step is made of several batches, print it once",
            )
    return None


def _bit_equal(attempts: Sequence[Attempt], resumes: Sequence[Resume], ground: Ground) -> int:
    """Steps after resumes, if all that the witness sees of every one of them is the undisturbed run's; else 0.

    What a step did shows in the line of the next one, so a resume of one line shows nothing; and an attempt that prints
    more losses than it has lines did something that the witness has not seen.
    """
    if not ground.repeatable or any(len(resume.lines) < 2 for resume in resumes):
        return 0
    if any(len(attempt.losses) > max((len(life.lines) for life in attempt.lives), default=0) for attempt in attempts):
        return 0
    pairs = [
        (line, resume.reference.get(resume.base + number))
        for resume in resumes
        for number, line in enumerate(resume.lines, 1)
    ]
    same = all(
        wanted is not None
        and (line.weights, line.state, line.buffers) == (wanted.weights, wanted.state, wanted.buffers)
        and all(line.random.get(name) == wanted.random.get(name) for name in ground.random)
        for line, wanted in pairs
    )
    return len(pairs) if same else 0


def noise(some: Mapping[int, float], others: Mapping[int, float]) -> float | None:
    differences = [abs(loss - others[step]) for step, loss in some.items() if step in others]
    return max((value for value in differences if not math.isnan(value)), default=None)


def _is_of_a_bar(step: int, loss: float, losses: Mapping[int, float], reference: Mapping[int, float]) -> bool:
    """The last step that a killed attempt printed, with the loss of the one before or after.

    A progress bar that counts before it is given the loss prints a step with the loss of the one before, and then with
    its own; which of them is printed, and read, is a matter of time.
    """
    if step != max(losses) or repr(loss) == repr(reference[step]):
        return False
    beside = (losses.get(step - 1), reference.get(step - 1), reference.get(step + 1))
    return any(one is not None and repr(one) == repr(loss) for one in beside)


def near(loss: float, wanted: float, bound: float) -> bool:
    """Whether a figure is within the bound of the wanted one; NaN is near NaN."""
    return loss == wanted or abs(loss - wanted) <= bound or (math.isnan(loss) and math.isnan(wanted))
