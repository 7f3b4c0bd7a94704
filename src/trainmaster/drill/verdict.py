"""Every finding of a drill of any program, put together from its attempts; and why one cannot be done."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.results import Finding, Verdict, error, fail, ok, skip, warn
from trainmaster.drill import judge
from trainmaster.drill.judge import Ground
from trainmaster.drill.lives import Resume
from trainmaster.drill.plan import DAMAGE, Shape, Strike
from trainmaster.drill.witness_log import Life

_UNSEEN = (
    "run it with a Python that reads PYTHONPATH (no -I, -E or -S) and steps a torch.optim optimizer, so that the "
    "witness can see it"
)
_NOISE = 3.0  # times the difference of the two undisturbed runs: two runs show little of the spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the program, up to its end or its death."""

    label: str
    folder: str
    lives: tuple[Life, ...]
    losses: Mapping[int, float]  # by step, as the program prints them
    codes: tuple[int, ...]  # of the processes that the agent started; negative is a signal
    message: str
    forced: bool  # it did not end in its grace and was killed
    begun: float
    ended: float
    grace_s: float
    stop_s: float | None  # seconds from the stop request to the end
    launcher: bool
    struck: bool
    left: tuple[int, ...] = ()  # processes that would not die
    reached: int = 0  # the last step of the run that it began; of an attempt in a copy of the run
    before: str = ""  # the strike that it was to recover from


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One strike and what came of it."""

    strike: Strike
    reached: bool
    died_at: int | None  # steps that were certainly done; None: it went on
    resumes: tuple[Resume, ...] = ()
    hit: Attempt | None = None  # in a copy of the run: the attempt that was struck
    branch: Attempt | None = None  # and its resume
    skipped: str | None = None  # why there was nothing to strike here
    damaged: str | None = None  # file
    newest: int | None = None  # step of the newest checkpoint when it was damaged
    older: int = 0  # checkpoints beside the damaged one


def unfit(reference: Attempt, folder: Path) -> Finding | None:
    """Why the program cannot be drilled, as its first undisturbed run shows."""
    if not reference.lives:
        return error("the witness saw no optimizer step of the program", action=_UNSEEN)
    places = {save.path for life in reference.lives for save in life.saves}
    if outside := sorted(path for path in places if not Path(path).is_relative_to(folder)):
        return error(
            f"it saves to {outside[0]}, which is outside its working folder; nothing was struck, because the run that "
            "is struck would write there too",
            action="save below TRAINMASTER_CHECKPOINTS, or to a path relative to the working folder",
        )
    return None


def unlike(first: Attempt, second: Attempt) -> Finding | None:
    """Why the two undisturbed runs are not two runs of one program."""
    steps = [len(run.lives[0].lines) if run.lives else 0 for run in (first, second)]
    if steps[0] == steps[1]:
        return None
    return error(
        f"the first undisturbed run did {steps[0]} steps and the second {steps[1]}: it may have found the checkpoints "
        "of the first, outside the drill's folders",
        action="save below TRAINMASTER_CHECKPOINTS, not to a place that every run shares (an absolute path, S3)",
    )


def too_few_saves(shape: Shape) -> Finding | None:
    if not shape.saves:
        return fail(
            f"no checkpoint was seen in {shape.steps} steps: a kill costs the whole run",
            action="save every few minutes to TRAINMASTER_CHECKPOINTS; if it saves elsewhere (S3), let it save there "
            "for the drill",
        )
    if len(shape.saves) < 3 or shape.saves[0] + 4 > shape.steps:
        return error(
            f"{len(shape.saves)} saves in {shape.steps} steps, after {', '.join(map(str, shape.saves))}: too few to be "
            "struck between",
            action="run more steps, or save more often: at least three saves, with two steps between them",
        )
    return None


def make_ground(first: Attempt, second: Attempt) -> Ground:
    """What two undisturbed runs have in common."""
    pairs = [
        (line, other)
        for one, two in zip(_by_rank(first), _by_rank(second), strict=False)
        for line, other in zip(one.lines, two.lines, strict=False)
    ]
    sources = Counter(source for line, _ in pairs for source, _ in dict.fromkeys(line.batches))
    return Ground(
        repeatable=all(line.weights == other.weights for line, other in pairs),
        random=frozenset(
            name
            for name in ("python", "torch", "numpy", "cuda")
            if pairs
            and name in pairs[0][0].random
            and all(line.random.get(name) == other.random.get(name) for line, other in pairs)
        ),
        data=all(line.batches == other.batches for line, other in pairs),
        source=sources.most_common(1)[0][0] if sources else None,
        ids=any(line.ids for line, _ in pairs),
    )


def judge_all(
    first: Attempt,
    second: Attempt,
    shape: Shape,
    *,
    struck: Sequence[Struck],
    attempts: Sequence[Attempt],
    resumes: Sequence[Resume],
    planned: Sequence[Strike],
    reached: int | None,
) -> list[tuple[str, Finding]]:
    """Every question of the drill and its answer, in the order in which they are told."""
    ground, noise = make_ground(first, second), _noise(first.losses, second.losses)
    found = [
        ("reference", _references(shape, ground, noise)),
        ("strikes", _strikes(struck, planned)),
        ("restart", _restarts(attempts, struck)),
        ("start", judge.no_restart(resumes)),
        ("lost", judge.newest_used(resumes)),
        ("weights", judge.weights(resumes)),
        ("optimizer", judge.optimizer(resumes)),
        ("schedule", judge.schedule(resumes)),
        ("random", judge.random_state(resumes, ground)),
        ("data", judge.data(resumes, ground)),
        ("accumulation", judge.accumulation(resumes, ground)),
        ("ranks", judge.ranks_agree(resumes, shape.world)),
    ]
    causes = [name for name, finding in found if finding.verdict is Verdict.FAIL]
    found.append(("losses", _losses(first.losses, attempts, resumes, ground=ground, noise=noise, causes=causes)))
    found += [(one.strike.name, damage(one, ground)) for one in struck if one.strike.name in DAMAGE]
    found += [("stop", _stop(one.hit, shape)) for one in struck if one.strike.name == "term" and one.hit is not None]
    found.append(("end", _end(attempts, steps=shape.steps, reached=reached)))
    found.append(("processes", _left(attempts)))
    return found


def printed_start(losses: Mapping[int, float], reference: Mapping[int, float]) -> int | None:
    """The step that an attempt went on from by what it printed; None where it does not print every step."""
    steps = sorted(reference)
    if not losses or not steps or steps != list(range(steps[0], steps[0] + len(steps))):
        return None
    return max(0, min(losses) - steps[0])


def damage(one: Struck, ground: Ground) -> Finding:
    """A damaged checkpoint is noticed: an older one is taken, or nothing starts."""
    words = str(one.strike)
    if one.skipped is not None:
        return skip(f"{words}: {one.skipped}", proof="the files that the struck run had saved")
    if not one.reached or one.branch is None:
        return error(f"{words}: no checkpoint was there to be damaged so", action="save more than one checkpoint")
    words = f"{words} ({one.damaged})"
    if not one.resumes:
        code = next((code for code in one.branch.codes if code), 0)
        if code == 0:
            return fail(f"{words}: the program ended with 0 and trained nothing", action=_FALL_BACK)
        return warn(
            f"{words}: noticed, and the program ended with {code}; somebody must remove it before the run goes on",
            action=_FALL_BACK,
        )
    starts = {resume.start for resume in one.resumes}
    if 0 in starts and (one.newest or 0) > 0:
        return fail(
            f"{words}: the run began at step 0, silently"
            + (f", although {one.older} older checkpoints were there" if one.older else ""),
            action=_FALL_BACK,
        )
    if all(start is not None and start < (one.newest or 0) for start in starts):
        return ok(f"{words}: noticed, went on from step {max(start or 0 for start in starts)}")
    wrong = [
        finding.reason
        for finding in (
            judge.weights(one.resumes),
            judge.optimizer(one.resumes),
            judge.random_state(one.resumes, ground),
        )
        if finding.verdict is Verdict.FAIL
    ]
    if one.strike.name == "flipped":
        # Hardly any trainer compares checksums; torch.load and safetensors do not.
        return warn(
            f"{words}: loaded without a word" + (f"; {wrong[0]}" if wrong else ""),
            action="keep a digest beside each file and compare it before loading: torch.load does not notice",
        )
    if wrong:
        return fail(f"{words}: loaded without a word; {wrong[0]}", action=_FALL_BACK)
    return ok(f"{words}: the resume did not need it, and nothing of the state was missing")


_FALL_BACK = (
    "verify a checkpoint before loading it, fall back to the one before, and stop with an error where none is good; "
    "keep at least two"
)


def _references(shape: Shape, ground: Ground, noise: float | None) -> Finding:
    saves = f"{shape.steps} steps, {len(shape.saves)} saves"
    if ground.repeatable:
        return ok(f"{saves}; two undisturbed runs are bit-equal in every step", steps=shape.steps)
    if noise is None:
        return ok(f"{saves}; two undisturbed runs differ, and no loss was printed")
    return ok(f"{saves}; two undisturbed runs differ in their losses by up to {noise:.3g}", noise=noise)


def _strikes(struck: Sequence[Struck], planned: Sequence[Strike]) -> Finding:
    done = {one.strike.name for one in struck if one.reached}
    missed = [
        strike for strike in planned if strike.name not in done | {one.strike.name for one in struck if one.skipped}
    ]
    if missed:
        words = "; ".join(map(str, missed))
        return error(f"not reached: {words}", action="run more steps, or choose another --seed")
    return ok(f"{len(done)} strikes, each where it was planned")


def _restarts(attempts: Sequence[Attempt], struck: Sequence[Struck]) -> Finding:
    """After every kill the same command starts again by itself."""
    starts = [(attempt.before, attempt) for attempt in attempts[1:]]
    starts += [(str(one.strike), one.branch) for one in struck if one.branch and one.strike.name not in DAMAGE]
    for before, attempt in starts:
        code = next((code for code in attempt.codes if code), 0)
        if not attempt.lives and code:
            saving = before.startswith("SIGKILL during a save")
            return fail(
                f"after {before} the program did not start again: exit code {code}, {attempt.message}",
                action="a checkpoint was named (by `latest`, or by its final name) before it was whole: write it under "
                "another name, fsync, rename it, and only then write `latest`"
                if saving
                else f"see {attempt.folder}: a start after a kill must need nobody's help",
            )
    return ok(f"{len(starts)} starts after a strike, none needed help") if starts else _nothing()


def _losses(
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
        else "something that the witness does not see is not restored: a GradScaler, averaged weights, augmentation"
    )
    bound = 0.0 if ground.repeatable else _NOISE * (noise or 0.0)
    pairs = [
        (step, loss, reference[step])
        for attempt in attempts[1:]
        for step, loss in attempt.losses.items()
        if step in reference
    ]
    wrong = [(step, loss, wanted) for step, loss, wanted in pairs if not _near(loss, wanted, bound)]
    if wrong:
        step, loss, wanted = wrong[0]
        within = "" if ground.repeatable else f" (noise allows {bound:.3g})"
        return fail(
            f"{len(wrong)} of {len(pairs)} losses after a resume are not those of the undisturbed run, first at step "
            f"{step}: {loss!r} instead of {wanted!r}{within}",
            action=action,
        )
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
    told = f"{len(pairs)} losses" if pairs else "no losses printed"
    return ok(f"{told}, and the weights of {len(steps)} steps after a resume, bit-equal", compared=len(pairs))


def _stop(hit: Attempt, shape: Shape) -> Finding:
    if hit.stop_s is None:
        return error("SIGTERM was not sent: the run had ended", action="run more steps, or choose another --seed")
    code = next((code for code in hit.codes if code), 0)
    return judge.stopped(
        code=code,
        took_s=hit.stop_s,
        grace_s=hit.grace_s,
        forced=hit.forced,
        finished=hit.reached >= shape.steps,
    )


def _end(attempts: Sequence[Attempt], *, steps: int, reached: int | None) -> Finding:
    if reached is None or not attempts:
        return error("the last attempt was not reached", action="see the strikes that were not reached")
    last = attempts[-1]
    if set(last.codes) != {0}:
        return fail(
            f"the last attempt ended with {list(last.codes)}: {last.message}", action=f"see the logs in {last.folder}"
        )
    if reached < steps:
        return fail(f"the last attempt ended with 0 at step {reached} of {steps}", action=f"see {last.folder}")
    return ok(f"the run came to step {reached}, its last, in attempt {len(attempts)}")


def _left(attempts: Sequence[Attempt]) -> Finding:
    if left := [pid for attempt in attempts for pid in attempt.left]:
        return fail(f"processes {left} would not die", action="look for a driver that hangs: dmesg")
    return ok("nothing of any attempt runs on")


def _nothing() -> Finding:
    return error("nothing was started again", action="see the strikes that were not reached")


def _by_rank(attempt: Attempt) -> list[Life]:
    return sorted(attempt.lives, key=lambda life: life.rank)


def _noise(some: Mapping[int, float], others: Mapping[int, float]) -> float | None:
    differences = [abs(loss - others[step]) for step, loss in some.items() if step in others]
    return max((value for value in differences if not math.isnan(value)), default=None)


def _near(loss: float, wanted: float, bound: float) -> bool:
    return loss == wanted or abs(loss - wanted) <= bound or (math.isnan(loss) and math.isnan(wanted))
