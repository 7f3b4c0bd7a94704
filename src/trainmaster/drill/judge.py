"""Judgement of a drill of any program: one function per question, on recorded lines. Nothing here touches the machine.

A finding that fails says what was seen, where, the likely cause, and what to write in the program. What nobody has
seen is an error, which makes the drill INCOMPLETE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.drill.lives import Resume
from trainmaster.drill.witness_log import Line

_SEE_STRIKES = "see which strikes happened, and whether the program started again after them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the two undisturbed runs have in common: only that can be asked of a resume."""

    repeatable: bool  # every weight of every step was bit-equal
    random: frozenset[str]  # generators whose state was the same
    data: bool  # every batch was the same
    source: str | None  # the data set that is trained on; None: no DataLoader was seen
    ids: bool  # the program tells its samples itself
    buffers: bool = False  # those of every step were the same
    saved: frozenset[str] = frozenset()  # entries of checkpoints that were the same in every save


def no_restart(resumes: Sequence[Resume]) -> Finding:
    """Where anything was saved, nothing starts at step 0."""
    if not resumes:
        return error("no start after a strike was seen to train", action=_SEE_STRIKES)
    for group in together(resumes):
        if all(resume.restarted for resume in group):  # where only some did, `ranks_agree` tells it
            resume = group[0]
            return fail(
                f"after {resume.strike} the run began at step 0, although step {resume.newest} was saved: "
                f"all {resume.done} steps were lost",
                action="the program does not look for a checkpoint at its start, or looks in another folder: load the "
                "newest one below TRAINMASTER_CHECKPOINTS before the first step, and stop where it cannot be read",
                step=0,
            )
    saved = sum(resume.newest is not None for resume in resumes)
    if not saved:
        return error("nothing was saved before any strike", action="save more often, or run more steps")
    return ok(f"{saved} starts with a checkpoint there, none of them at step 0")


def newest_used(resumes: Sequence[Resume]) -> Finding:
    """It goes on from the newest checkpoint that was whole."""
    judged = [resume for resume in resumes if resume.start is not None and resume.newest is not None]
    if not judged:
        return error("no start could be placed in the run", action=_SEE_STRIKES)
    for resume in judged:
        if resume.base < (resume.newest or 0) and not resume.restarted:
            return fail(
                f"after {resume.strike} it went on from step {resume.base}, although step {resume.newest} was saved: "
                f"{resume.lost} steps lost instead of {resume.done - (resume.newest or 0)}",
                action="the program does not choose the newest checkpoint: compare step numbers, not names or dates",
            )
    most = max((resume.lost for resume in judged if not resume.restarted), default=None)
    if most is None:
        return error("every start was at step 0", action="see the finding about step 0")
    return ok(f"at most {most} steps lost, back to the newest save each time", lost=most)


def weights(resumes: Sequence[Resume]) -> Finding:
    """The weights before the first step are those that were saved."""
    judged = _placed(resumes)
    for resume in judged:
        held = resume.held(resume.base + 1)
        if resume.start is None or (held is not None and resume.lines[0].weights != held.weights):
            return fail(
                f"after {resume.strike} the weights of rank {resume.rank} are none that the run had at step "
                f"{resume.base}",
                action="the model's state is not loaded, or is loaded and then overwritten: call "
                "model.load_state_dict(checkpoint['model']) after the model is built and before it is trained",
            )
    return _enough(judged, "weights bit-equal to those that were saved")


def optimizer(resumes: Sequence[Resume]) -> Finding:
    """The optimizer's state before the first step is the one that was saved."""
    judged = _placed(resumes)
    for resume in judged:
        held, got = resume.held(resume.base + 1), resume.lines[0]
        if held is not None and held.state != got.state:
            what = "is empty" if got.state is None else "is another one"
            return fail(
                f"after {resume.strike} the state of rank {resume.rank}'s optimizer {what} at step {resume.base + 1}: "
                "momentum begins anew",
                action="the optimizer's state is not saved or not loaded: save optimizer.state_dict() and call "
                "optimizer.load_state_dict(...)",
            )
    if judged and all(resume.lines[0].state is None for resume in judged):
        return skip("this optimizer keeps no state", proof="no state at any step, of the undisturbed run either")
    return _enough(judged, "optimizer states bit-equal to those that were saved")


def buffers(resumes: Sequence[Resume], ground: Ground) -> Finding:
    """Buffers at the first step, after its forward, are those that the run had there."""
    judged = _placed(resumes)
    seen = [resume.lines[0].buffers for resume in judged]
    if judged and None in seen:
        return skip("buffers such as BatchNorm statistics were not looked at", proof="torch before 2.0 tells of none")
    if judged and not any(seen):
        return skip("no buffers beside the trained weights", proof="no module with a trained parameter registered any")
    if judged and not ground.buffers:
        return skip("buffers are not repeatable", proof="they differ between the two undisturbed runs")
    for resume in judged:
        held = resume.held(resume.base + 1)
        if held is not None and held.buffers != resume.lines[0].buffers:
            return fail(
                f"after {resume.strike} buffers of rank {resume.rank}, as BatchNorm's statistics, are not those that "
                f"the run had in step {resume.base + 1}: evaluation gives other results",
                action="save model.state_dict(), not only model.parameters(), and load it with strict=True",
            )
    return _enough(judged, "buffers, as BatchNorm's statistics, bit-equal to those that were saved")


def schedule(resumes: Sequence[Resume]) -> Finding:
    """The learning rate of every step is that of the undisturbed run."""
    judged, steps = _placed(resumes), 0
    for resume in judged:
        for number, line in enumerate(resume.lines, 1):
            wanted = resume.reference.get(resume.base + number)
            # The rate of the first step is kept in the optimizer's state: lost with it, it is told there.
            if wanted is None or (number == 1 and line.state is None and wanted.state is not None):
                continue
            steps += 1
            if not _close(line.rates, wanted.rates):
                first = resume.reference.get(number)
                again = first is not None and _close(line.rates, first.rates)
                as_what = f", that of step {number}: the schedule began anew" if again else ""
                got, had = next(
                    (pair for pair in zip(line.rates, wanted.rates, strict=False) if not _close(pair[:1], pair[1:])),
                    (line.rates[0], wanted.rates[0]),
                )
                return fail(
                    f"after {resume.strike} the learning rate of step {resume.base + number} is {got:g} "
                    f"instead of {had:g}{as_what}",
                    action="the state of the learning rate schedule is not saved or not loaded: save "
                    "scheduler.state_dict() and load it after the scheduler is built",
                )
    return _enough(judged, f"learning rates right, {steps} steps")


def random_state(resumes: Sequence[Resume], ground: Ground) -> Finding:
    """The random generators go on where they were; or what they draw is of no effect."""
    judged, unused = _placed(resumes), set[str]()
    undecided: list[tuple[Resume, list[str]]] = []  # struck again in its first step: no weights tell of an effect
    if judged and not ground.random:
        return skip("no generator is seeded", proof="their states differ between the two undisturbed runs")
    for resume in judged:
        held, got = resume.held(resume.base + 1), resume.lines[0]
        # A step of fewer micro-batches draws fewer numbers: told by `accumulation`.
        if held is None or _lost_in_the_middle(resume, ground):
            continue
        wrong = sorted(name for name in ground.random if held.random.get(name) != got.random.get(name))
        if not wrong:
            continue
        pairs = _pairs_after(resume)
        if not pairs:
            undecided.append((resume, wrong))
        elif _equal(pairs):
            unused.update(wrong)
        else:
            return _another_random_state(resume, wrong)
    for resume, wrong in undecided:
        if not unused.issuperset(wrong):
            return _another_random_state(resume, wrong)
    without = f"; that of {' and '.join(sorted(unused))} differs, without effect on any weight" if unused else ""
    return _enough(judged, f"random states as they were{without}")


def data(resumes: Sequence[Resume], ground: Ground, *, failed: bool = False) -> Finding:
    """Every batch after a resume is the one that the run would have read.

    `failed`: something else of the state was not restored, which changes the weights too.
    """
    judged, batches = _placed(resumes), 0
    if judged and ground.source is None and not ground.ids:
        return _data_by_weights(judged, ground, failed=failed)
    for resume in judged:
        if found := _first_wrong_batch(resume, ground):
            return found
        batches += sum(len(_read(resume, number, ground)) for number in range(1, len(resume.lines) + 1))
    return _enough(judged, f"data goes on where it was, {batches} batches")


def accumulation(resumes: Sequence[Resume], ground: Ground) -> Finding:
    """The first step after a resume is made of as many micro-batches as it would have been."""
    judged = _placed(resumes)
    if judged and ground.source is None:
        return skip("no DataLoader: micro-batches are not told apart", proof="no batch was seen in any run")
    most = 1
    for resume in judged:
        wanted, got = _wanted(resume, 1, ground), _read(resume, 1, ground)
        most = max(most, len(wanted))
        if lost := _lost_in_the_middle(resume, ground):
            return fail(
                f"after {resume.strike} step {resume.base + 1} was made of {_made_of(got, wanted, lost)}: "
                f"{lost} had been added to its gradients before the save, and were lost",
                action="the checkpoint was taken in the middle of gradient accumulation: save only after "
                "optimizer.step(), or save the gradients and the place in the step too",
            )
    if judged and most == 1:
        return skip("one batch a step: nothing is accumulated", proof="no step of the undisturbed run read two")
    return _enough(judged, f"first steps made of all {most} micro-batches")


def _made_of(got: Sequence[str], wanted: Sequence[str], lost: int) -> str:
    short = len(got) < len(wanted) or list(got) == list(wanted)  # else it was filled up with the next ones
    return f"{len(wanted) - lost if short else len(wanted)} micro-batches of {len(wanted)}"


def ranks_agree(resumes: Sequence[Resume], world: int) -> Finding:
    """All ranks go on from the same step, each with what it had."""
    if world == 1:
        return skip("one rank", proof="the world size of the undisturbed run is 1")
    compared = 0
    for group in together(resumes):
        strike = group[0].strike
        starts = {resume.rank: resume.start for resume in group}
        if len(set(starts.values())) > 1:
            words = ", ".join(
                f"rank {rank} {'with a state of no step' if start is None else f'from step {start}'}"
                for rank, start in sorted(starts.items())
            )
            return fail(
                f"after {strike} ranks did not go on from the same step: {words}",
                action="the checkpoint is loaded on some ranks only: load it on every rank, or broadcast model and "
                "optimizer state from the rank that loads",
            )
        if not_loaded(group):
            without = " and ".join(str(resume.rank) for resume in not_loaded(group))
            return fail(
                f"after {strike} the optimizer of rank {without} is not what it was at step {group[0].base + 1}, "
                "although that of other ranks is",
                action="the checkpoint is loaded on some ranks only (DDP sends them the weights, nothing else): load "
                "it on every rank, or broadcast the optimizer's state and the step too",
            )
        compared += len(group) > 1
    if not compared:
        return error("no start was seen on two ranks", action="raise the number of steps")
    return ok(f"{compared} starts, all {world} ranks from the same step")


def stopped(*, code: int, took_s: float, grace_s: float, forced: bool, finished: bool) -> Finding:
    """After SIGTERM the program ends by itself, in time, and does not say that it has finished."""
    if finished and not forced:
        return warn(
            f"SIGTERM was ignored: the program did all of its steps that were left, in {took_s:.1f} s of {grace_s:g}",
            action="handle SIGTERM: save after the step under way, then exit with 75; a longer run would be killed",
        )
    if forced:
        return fail(
            f"after SIGTERM the program ran on for all of its {grace_s:g} s and was killed",
            action="handle SIGTERM: save after the step under way, then exit with 75 (or any code but 0)",
        )
    if code == 0:
        return warn(
            f"ended {took_s:.1f} s after SIGTERM with exit code 0, which says that the run is finished",
            action="exit with 75 (or any code but 0) when stopped before the last step, so that it is started again",
        )
    words = "by the signal itself, without a save" if code == -15 else f"with exit code {code}"
    return ok(f"ended {took_s:.1f} s after SIGTERM {words}; {grace_s:g} s were allowed", took_s=took_s)


def together(resumes: Sequence[Resume]) -> list[list[Resume]]:
    """Resumes of the same start, one for each rank."""
    groups: dict[tuple[str, int], list[Resume]] = {}
    for resume in resumes:
        groups.setdefault((resume.strike, resume.done), []).append(resume)
    return list(groups.values())


def not_loaded(resumes: Sequence[Resume]) -> list[Resume]:
    """Ranks that hold another optimizer state than they had, where others of the same start hold the right one."""
    found: list[Resume] = []
    for group in together(resumes):
        seen = [(resume, held) for resume in _placed(group) if (held := resume.held(resume.base + 1)) is not None]
        wrong = [resume for resume, held in seen if held.state != resume.lines[0].state]
        found += wrong if len(wrong) < len(seen) else []
    return found


def _placed(resumes: Sequence[Resume]) -> list[Resume]:
    """Resumes that went on from a checkpoint; of one that began at step 0 there is nothing more to say."""
    return [resume for resume in resumes if not resume.restarted and (resume.newest is not None or resume.start)]


def _enough(judged: Sequence[Resume], words: str) -> Finding:
    if not judged:
        return error("no resume from a checkpoint was seen", action=_SEE_STRIKES)
    return ok(f"{len(judged)} resumes: {words}")


def _close(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        abs(one - other) <= 1e-9 * max(abs(one), abs(other)) for one, other in zip(some, others, strict=True)
    )


def _pairs_after(resume: Resume) -> list[tuple[Line, Line]]:
    """The steps after the first one, each with the same step of the run before or of the undisturbed run."""
    numbered = ((line, resume.held(resume.base + number)) for number, line in enumerate(resume.lines[1:], 2))
    return [(line, held) for line, held in numbered if held is not None]


def _equal(pairs: Sequence[tuple[Line, Line]]) -> bool:
    return all(line.weights == held.weights for line, held in pairs)


def _same_after(resume: Resume) -> bool:
    """Weights of the steps after the first one: some are known, and all are bit-equal."""
    pairs = _pairs_after(resume)
    return len(pairs) > 0 and _equal(pairs)


def _another_random_state(resume: Resume, wrong: Sequence[str]) -> Finding:
    return fail(
        f"after {resume.strike} the random state of {' and '.join(wrong)} in rank {resume.rank} is another one "
        f"at step {resume.base + 1}: dropout, noise and shuffling are not those of the undisturbed run",
        action="save the states (torch.get_rng_state, torch.cuda.get_rng_state_all, random.getstate, "
        "numpy.random.get_state) and set them just before the first step, after the DataLoader is iterated",
    )


def _data_by_weights(judged: Sequence[Resume], ground: Ground, *, failed: bool) -> Finding:
    if all(_same_after(resume) for resume in judged):
        return ok(
            f"{len(judged)} resumes: no DataLoader was seen; the weights after the resumes are those of the "
            "undisturbed run, which other data would have changed"
        )
    if failed and ground.repeatable:
        return error(
            "not judged: no DataLoader was seen, and the weights that would tell follow from what failed",
            action="mend first what failed",
        )
    why = "the weights are not repeatable enough to tell"
    if ground.repeatable:
        moved = next((resume for resume in judged if not _equal(_pairs_after(resume))), None)
        why = f"the weights after {moved.strike} are others" if moved else "too few steps after a resume were seen"
    return error(
        f"no DataLoader was seen, and {why}",
        action="call trainmaster.drill.sample(ids) with the samples of each step",
    )


def _read(resume: Resume, number: int, ground: Ground) -> list[str]:
    line = resume.lines[number - 1]
    return [digest for source, digest in line.batches if source == ground.source]


def _wanted(resume: Resume, number: int, ground: Ground) -> list[str]:
    step = resume.base + number
    # In the run's own history a step may hold batches that were only read over, after an earlier resume.
    line = resume.reference.get(step) if ground.data else resume.own.get(step)
    return [] if line is None else [digest for source, digest in line.batches if source == ground.source]


def _lost_in_the_middle(resume: Resume, ground: Ground) -> int:
    """Micro-batches of the first step that were read before the save and not again."""
    wanted, got = _wanted(resume, 1, ground), _read(resume, 1, ground)
    for lost in range(1, len(wanted)):
        left = wanted[lost:]
        # The step is short, or filled up with the next ones.
        if got[: len(left)] == left and got != wanted:
            return lost
        if got[-len(wanted) :][: len(left)] == left and got[-len(wanted) :] != wanted:
            return lost
        if got[-len(left) :] == left and len(got) > len(left) and got[-len(wanted) :] != wanted:
            return lost
    ahead = _read_ahead(resume, ground)
    if wanted and ahead and not _same_after(resume):
        wanted = _wanted(resume, 0, ground)[-ahead:] + wanted
        return next((lost for lost in range(1, len(wanted)) if got == wanted[lost:]), 0)
    return 0


def _read_ahead(resume: Resume, ground: Ground) -> int:
    """Batches that are read before they are needed: so many more before the first step than before each later one."""
    first, second, third = (
        sum(source == ground.source for source, _ in line.batches) if (line := resume.reference.get(step)) else 0
        for step in (1, 2, 3)
    )
    return max(0, first - second) if second == third else 0


def _first_wrong_batch(resume: Resume, ground: Ground) -> Finding | None:
    if ground.ids:
        for number, line in enumerate(resume.lines, 1):
            wanted = resume.planned(resume.base + number)
            if wanted is not None and wanted.ids != line.ids:
                return _wrong_data(resume, number, "the samples are not those of the undisturbed run")
        return None
    if _lost_in_the_middle(resume, ground):
        return None  # told by `accumulation`
    for number in range(1, len(resume.lines) + 1):
        batches, got = _wanted(resume, number, ground), _read(resume, number, ground)
        # More before the first ones are read over, to come to the place.
        if batches and (got[-len(batches) :] if number == 1 else got) != batches:
            return _wrong_data(resume, number, _where(resume, number, ground))
    return None


def _where(resume: Resume, number: int, ground: Ground) -> str:
    """Where in the undisturbed run the batches stand that were read instead."""
    got = [digest for after in range(number, len(resume.lines) + 1) for digest in _read(resume, after, ground)][:16]
    flat: list[str] = []
    begins: dict[int, int] = {}
    for step, line in sorted(resume.reference.items()):
        begins[step] = len(flat)
        flat += [digest for source, digest in line.batches if source == ground.source]
    place = next((at for at in range(len(flat)) if flat[at : at + len(got)] == got), None) if got else None
    right = begins.get(resume.base + number)
    if place == 0:
        return "data began anew: its first batches are the first ones of the whole run, read a second time"
    if place is None or right is None:
        return "they stand nowhere in the undisturbed run in this order: the shuffle is another one"
    return f"{abs(place - right)} batches were {'skipped' if place > right else 'read a second time'}"


def _wrong_data(resume: Resume, number: int, words: str) -> Finding:
    return fail(
        f"after {resume.strike} rank {resume.rank} read other data in step {resume.base + number}: {words}",
        action="the place in the data is not saved or not restored: save epoch, batches done and the state of the "
        "sampler's generator (or use a StatefulDataLoader), and skip what was read",
    )
