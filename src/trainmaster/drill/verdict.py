"""Every finding of a drill of any program, put together from its attempts; and why one cannot be done."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from trainmaster.core.results import Finding, Verdict, error, fail, ok, skip, warn
from trainmaster.drill import beside, judge, judge_data, judge_end, losses, printed, ranks, storage_verdict
from trainmaster.drill.attempt import AGAIN, NOT_RUN
from trainmaster.drill.ground import Ground, make_ground
from trainmaster.drill.lives import JUST_S, Resume
from trainmaster.drill.plan import APART, DAMAGE, STORAGE, Shape, Strike
from trainmaster.drill.record import Attempt, Struck, count

_UNSEEN = (
    "run it with a Python that reads PYTHONPATH (no -I, -E or -S) and steps a torch.optim optimizer, so that the "
    "witness can see it"
)


def unfit(reference: Attempt, folder: Path) -> Finding | None:
    """Why the program cannot be drilled, as its first undisturbed run shows."""
    if not reference.lives and set(reference.codes) == {0}:
        return error(
            "the program ended with 0, and the witness, the drill's module inside it, saw no optimizer step: it has no "
            "optimizer of torch, or it found checkpoints of an earlier run in its folder and had nothing left to do",
            action=f"drill a folder without old checkpoints, or let it train for more steps; else {_UNSEEN}",
        )
    if not reference.lives:
        return error("the witness, the drill's module inside the program, saw no optimizer step", action=_UNSEEN)
    places = {save.path for life in reference.lives for save in life.saves}
    if outside := sorted(path for path in places if not Path(path).is_relative_to(folder.resolve())):
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
    if holed := _unseen(first, second, *attempts):
        return [("witness", holed)]
    ground, noise = make_ground(first, second), losses.noise(first.clear_losses, second.clear_losses)
    missed = {id(resume) for resume in judge.not_loaded(resumes)}  # told by `ranks`; what else they lack follows
    loaded = [resume for resume in resumes if id(resume) not in missed]
    # A loader may share its order among ranks: where one did not load, the batches of the others are not theirs either.
    groups = judge.together(resumes)
    alike = [resume for group in groups if not any(id(one) in missed for one in group) for resume in group]
    state = [
        ("weights", judge.weights(loaded)),
        ("optimizer", beside.order(loaded) or judge.optimizer(loaded)),
        ("hyperparameters", beside.hyperparameters(loaded, ground)),
        ("schedule", judge.schedule(loaded)),
        *_told("scaler", beside.scaler(loaded, ground)),
        *_told("averages", beside.averages(loaded)),
        ("random", judge.random_state(loaded, ground)),
    ]
    end = judge_end.end(first.clear_losses, attempts, resumes, steps=shape.steps, reached=reached)
    miscounted = judge_end.is_miscounted(end)
    if miscounted:
        state = [(name, _COUNTED if judge.is_shifted(finding) else finding) for name, finding in state]
    lacks = miscounted or any(finding.verdict is Verdict.FAIL for _, finding in state)
    data = judge_data.data(alike, ground, failed=lacks)
    if miscounted and data.verdict is Verdict.FAIL:
        data = _COUNTED
    found = [
        *_told("witness", losses.judge_seen([first, second, *attempts])),
        ("reference", _references(shape, ground, noise)),
        ("strikes", _strikes(struck, planned)),
        ("restart", _restarts(attempts, struck)),
        ("start", judge.no_restart(resumes)),
        ("lost", judge.newest_used(resumes)),
        *state,
        ("data", _APART if missed and not alike else data),
        ("accumulation", _APART if missed and not alike else judge_data.accumulation(alike, ground)),
        ("ranks", _some_loaded(attempts, shape) or judge.ranks_agree(resumes, shape.world)),
    ]
    # Other weights, data, steps or random numbers give other buffers.
    bad = {name for name, finding in found if finding.verdict is Verdict.FAIL}
    others = bad - {"scaler", "averages"} or judge_end.may_be_miscounted(end)
    found.append(("buffers", _FOLLOWS if others else judge.buffers(loaded, ground)))
    found += [] if bad or others else _told("saved", beside.saved(loaded, ground))
    causes = [name for name, finding in found if finding.verdict is Verdict.FAIL]
    if miscounted or (judge_end.may_be_miscounted(end) and not causes):
        causes.append("end")
    told = losses.judge_losses(first.clear_losses, attempts, resumes, ground=ground, noise=noise, causes=causes)
    found.append(("losses", told))
    if not causes and told.verdict is not Verdict.FAIL:
        differ = told.verdict is Verdict.WARN
        lines = printed.judge(
            first, second, attempts, resumes, ground=ground, noise=noise, steps=shape.steps, losses_differ=differ
        )
        found += _told("printed", lines)
    damaged = [one for one in struck if one.strike.name in DAMAGE]
    unneeded = {one.damaged for one in damaged if one.strike.name == "missing" and _is_unneeded(one, ground)}
    found += [(one.strike.name, damage(one, ground, unneeded=unneeded)) for one in damaged]
    disks = [one for one in struck if one.strike.name in STORAGE]
    found += [(one.strike.name, storage_verdict.judge(one, _wrong_state(one, ground))) for one in disks]
    found += [("other ranks", _other_ranks(one, first)) for one in struck if one.strike.name == "ranks"]
    found += [("stop", _stop(one.hit, shape)) for one in struck if one.strike.name == "term" and one.hit is not None]
    found.append(("end", end))
    found.append(("processes", _left(attempts)))
    return found


def _told(name: str, finding: Finding | None) -> list[tuple[str, Finding]]:
    return [] if finding is None else [(name, finding)]


def interrupted(
    found: Sequence[tuple[str, Finding]], struck: Sequence[Struck], planned: Sequence[Strike]
) -> list[tuple[str, Finding]]:
    """The findings of a drill that was interrupted: what needs the whole of it is not known, a fault that was seen is.

    `struck`: strikes whose resume was seen.
    """
    seen = {one.strike.name for one in struck}
    left = [strike for strike in planned if strike.name not in seen]
    started = any(one.resumes for one in struck)
    told: list[tuple[str, Finding]] = []
    for name, finding in found:
        is_open = name in ("end", "processes") or (finding.verdict is Verdict.ERROR and not started)
        if name == "strikes":
            words = "; ".join(map(str, left)) or "the last attempt"
            told.append((name, error(f"interrupted, and not run to the end: {words}", action=AGAIN)))
        elif is_open and finding.verdict is not Verdict.FAIL and name != "witness":
            told.append((name, NOT_RUN))
        else:
            told.append((name, finding))
    claims = {"ranks": "other ranks", "term": "stop", **{name: name for name in (*DAMAGE, *STORAGE)}}
    return told + [(claims[strike.name], NOT_RUN) for strike in left if strike.name in claims]


def _unseen(*attempts: Attempt) -> Finding | None:
    """Steps are counted by their lines: with one missing, every judgement after it would be of another step."""
    for attempt in attempts:
        for life in attempt.lives:
            if life.missed:
                return error(
                    f"the witness could not write {life.missed} steps of rank {life.rank}: nothing can be compared",
                    action="drill again; if it stays so, the optimizer's state or the batches hold what it cannot read",
                )
    return None


def damage(one: Struck, ground: Ground, *, unneeded: Collection[str | None] = ()) -> Finding:
    """A damaged checkpoint is noticed: an older one is taken, or nothing starts.

    `unneeded`: files without which the run went on all the same, as an exported model.
    """
    if one.skipped is not None:
        return skip(one.skipped, proof="the files that the struck run had saved")
    if not one.reached or one.branch is None:
        return error(
            "no checkpoint was there to be damaged, with an older one beside it",
            action="run more steps, with at least two saves after the last kill",
        )
    words = str(one.damaged)
    alone = "" if one.older else "; it keeps only one checkpoint, so there was none to go back to"
    to_do = _FALL_BACK if one.older else _KEEP_TWO
    if not one.resumes:
        code = next((code for code in one.branch.codes if code), 0)
        if code == 0:
            return fail(f"{words}: the program ended with 0 and trained nothing", action=_FALL_BACK)
        return warn(
            f"{words}: noticed, and the program ended with {code}"
            + (alone or "; somebody must remove it before the run goes on"),
            action=to_do,
        )
    starts = {resume.start for resume in one.resumes}
    if 0 in starts and (one.newest or one.unsure or 0) > 0:
        return fail(
            f"{words}: the run began at step 0" + (alone or f", silently, although {one.older} older were there"),
            action=to_do,
        )
    if all(start is not None and start < (one.newest or 0) for start in starts):
        return ok(f"{words}: noticed, went on from step {max(start or 0 for start in starts)}")
    start = min(start or 0 for start in starts)
    if one.unsure is not None and starts == {start} and (one.newest or 1) <= start < one.unsure:
        # Which of the two was damaged, only its name may tell.
        numbers = {int(number) for number in re.findall(r"\d+", one.damaged or "")} & {start, one.unsure}
        if numbers == {one.unsure}:
            return ok(f"{words}: noticed, went on from step {start}")
        if numbers != {start}:
            return error(
                f"{words}: whether it was of step {one.unsure} or {start} is not known, because the save after "
                f"step {one.unsure}, in the background, had ended less than {JUST_S:g} s before",
                action=judge.WAIT,
            )
    wrong = _wrong_state(one, ground)
    if one.strike.name == "flipped" and one.damaged not in unneeded:
        # What the bit was part of cannot be seen in a sample of the state. It was loaded, and nobody was told: the run
        # goes on with another number somewhere, which is why this fails although no trainer we know notices by itself.
        return fail(
            f"{words}: loaded without a word" + (f"; {wrong[0]}" if wrong else ""),
            action="neither torch.load nor safetensors compares checksums: write the sha256 of each file beside it "
            "when it is saved, compare before loading, and take the checkpoint before it where they differ "
            "(trainmaster examples drill-torchrun)",
        )
    if wrong:
        return fail(f"{words}: loaded without a word; {wrong[0]}", action=_FALL_BACK)
    return ok(f"{words}: the resume did not need it, and nothing of the state was missing")


def _other_ranks(one: Struck, reference: Attempt) -> Finding:
    printed = judge_end.printed_start(one.branch.losses, reference.clear_losses) if one.branch is not None else None
    return ranks.judge(one, printed)


def _is_unneeded(one: Struck, ground: Ground) -> bool:
    """The resume went on from the newest step although this file was missing, and nothing of the state was wrong."""
    from_newest = bool(one.resumes) and all(resume.start == one.newest for resume in one.resumes)
    return from_newest and not _wrong_state(one, ground)


def _wrong_state(one: Struck, ground: Ground) -> list[str]:
    findings = (
        judge.weights(one.resumes),
        judge.optimizer(one.resumes),
        beside.hyperparameters(one.resumes, ground),
        beside.scaler(one.resumes, ground),
        beside.averages(one.resumes),
        judge.random_state(one.resumes, ground),
    )
    return [finding.reason for finding in findings if finding is not None and finding.verdict is Verdict.FAIL]


_APART = error("not judged: ranks went on from different states", action="mend first what the finding on ranks tells")
_COUNTED = error(
    "not judged: it follows from the number of the step, which is another one than that of the state",
    action="mend first what the finding on the end of the run tells",
)
_FOLLOWS = error("not judged: buffers follow from what failed above", action="mend first what failed")
_FALL_BACK = (
    "verify a checkpoint before loading it, fall back to the one before, and stop with an error where none is good; "
    "keep at least two"
)
_KEEP_TWO = (
    "keep at least two checkpoints: delete the older one only when a newer one is whole; fall back to it where the "
    "newest cannot be verified, and stop with an error where none is good"
)


def _references(shape: Shape, ground: Ground, noise: float | None) -> Finding:
    saves = f"{shape.steps} steps, {len(shape.saves)} saves"
    if ground.repeatable:
        return ok(f"{saves}; two undisturbed runs are bit-equal in every step", steps=shape.steps)
    if noise is None:
        return ok(f"{saves}; two undisturbed runs differ, and no loss was printed")
    return ok(f"{saves}; two undisturbed runs differ in their losses by up to {noise:.3g}", noise=noise)


def _strikes(struck: Sequence[Struck], planned: Sequence[Strike]) -> Finding:
    tally = count(struck, planned)
    if tally.missed:
        words = "; ".join(map(str, tally.missed))
        return error(f"not reached: {words}", action="run more steps, or choose another --seed")
    return ok(f"{tally.done} strike{'s' * (tally.done != 1)}, each where it was planned")


def _restarts(attempts: Sequence[Attempt], struck: Sequence[Struck]) -> Finding:
    """After every kill the same command starts again by itself."""
    starts = [(attempt.before, attempt) for attempt in attempts[1:]]
    starts += [(str(one.strike), one.branch) for one in struck if one.branch and one.strike.name not in APART]
    for before, attempt in starts:
        code = next((code for code in attempt.codes if code), 0)
        if attempt.hung and (attempt is not attempts[-1] or not attempt.lives):
            if attempt.loaded and attempt.lives == ():
                continue  # told by `ranks`, and by `end`
            return fail(f"after {before} the program hung and was killed", action=judge_end.HUNG)
        if not attempt.lives and code:
            saving = before.startswith("SIGKILL during a save")
            return fail(
                f"after {before} the program did not start again: exit code {code}, {attempt.message}",
                action="a checkpoint was named (by `latest`, or by its final name) before it was whole: write it under "
                "another name, fsync, rename it, and only then write `latest`"
                if saving
                else f"see {attempt.folder}: a start after a kill must need nobody's help",
            )
    if not starts:
        return _nothing()
    many = f"{len(starts)} start{'s' * (len(starts) > 1)}"
    return ok(f"{many} with the checkpoints as they were saved, none needed help{_apart(struck)}")


def _apart(struck: Sequence[Struck]) -> str:
    """Starts that are not counted here: with damaged checkpoints, after a strike at the disk, with fewer ranks."""
    apart = sum(one.branch is not None and one.strike.name in APART for one in struck)
    others = "after damage, strikes at the disk or with fewer ranks"
    return f"; judged below, each by its own claim: {apart} {others}" if apart else ""


def _some_loaded(attempts: Sequence[Attempt], shape: Shape) -> Finding | None:
    """A start that hung before its first step, where some ranks had read a checkpoint and the others had not."""
    for attempt in attempts:
        without = sorted(set(range(shape.world)) - attempt.loaded)
        if attempt.hung and not attempt.lives and attempt.loaded and without:
            ranks = " and ".join(map(str, without))
            return fail(
                f"after {attempt.before} the program hung before its first step: rank {ranks} had read no checkpoint, "
                "the others had",
                action="the checkpoint is loaded on some ranks only, which wait for the others: load it on every rank",
            )
    return None


def _stop(hit: Attempt, shape: Shape) -> Finding:
    if hit.stop_s is None:
        return error("SIGTERM was not sent: the run had ended", action="run more steps, or choose another --seed")
    code = next((code for code in hit.codes if code), 0)
    return judge.stopped(
        code=code, took_s=hit.stop_s, grace_s=hit.grace_s, forced=hit.forced, finished=hit.reached >= shape.steps
    )


def _left(attempts: Sequence[Attempt]) -> Finding:
    if left := [pid for attempt in attempts for pid in attempt.left]:
        return fail(f"processes {left} would not die", action="look for a driver that hangs: dmesg")
    return ok("nothing of any attempt runs on")


def _nothing() -> Finding:
    return error("nothing was started again", action="see the strikes that were not reached")
