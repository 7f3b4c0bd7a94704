"""Judgement of a drill of any program: one function per question, on recorded lines. Nothing here touches the machine.

A finding that fails says what was seen, where, the likely cause, and what to write in the program. What nobody has
seen is an error, which makes the drill INCOMPLETE.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.drill.cuts import parts_of
from trainmaster.drill.ground import SEE_STRIKES, Ground, count_known, enough, equal, pairs_after, placed
from trainmaster.drill.judge_data import lost_in_the_middle
from trainmaster.drill.lives import JUST_S, Resume
from trainmaster.drill.witness_log import Line

_LOAD_SCHEDULE = (
    "the state of the learning rate schedule is not saved or not loaded: save scheduler.state_dict() and load it after "
    "the scheduler is built"
)
_TOO_FEW = (
    "scheduler.step() is called too seldom around a resume: call it before the save of its step, so that "
    "scheduler.state_dict() counts all steps that are saved, and call it after each step that follows the load"
)
_TOO_MANY = (
    "scheduler.step() is called too often around a resume: after scheduler.load_state_dict() (or with last_epoch= when "
    "the scheduler is built) do not call it before the next optimizer.step()"
)
WAIT = (
    f"give a save in the background {JUST_S:g} s of steps before the next strike: run more or longer steps between "
    "saves, or let the program wait for the save (thread.join(), future.result()) before its next step, for the drill"
)


def no_restart(resumes: Sequence[Resume]) -> Finding:
    """Where anything was saved, nothing starts at step 0."""
    if not resumes:
        return error("no start after a strike was seen to train", action=SEE_STRIKES)
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
    # A start at a later step shows that there was something to go on from.
    saved = sum(resume.newest is not None or bool(resume.start) for resume in resumes)
    if not saved:
        return _unfinished(resumes) or error(
            "nothing was saved before any strike", action="save more often, or run more steps"
        )
    return ok(f"{saved} starts with a checkpoint there, none of them at step 0")


def newest_used(resumes: Sequence[Resume]) -> Finding:
    """It goes on from the newest checkpoint that was whole."""
    judged = [
        resume
        for resume in resumes
        if (resume.start is not None and resume.newest is not None) or (resume.unsure is not None and resume.start)
    ]
    if not judged:
        return _unfinished(resumes) or error("no start could be placed in the run", action=SEE_STRIKES)
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


def _unfinished(resumes: Sequence[Resume]) -> Finding | None:
    """Where saves in the background were the only ones, and none was certainly whole at a strike."""
    one = next((resume for resume in resumes if resume.unsure is not None), None)
    if one is None:
        return None
    return error(
        f"the save after step {one.unsure}, in the background, was not certainly finished at {one.strike}: it had "
        f"ended less than {JUST_S:g} s before, and no save before it is known",
        action=WAIT,
    )


def weights(resumes: Sequence[Resume]) -> Finding:
    """The weights before the first step are those that were saved."""
    judged = placed(resumes)
    for resume in judged:
        held = resume.held(resume.base + 1)
        if resume.start is None or (held is not None and resume.lines[0].weights != held.weights):
            return fail(
                f"after {resume.strike} the weights of rank {resume.rank} are none that the run had at step "
                f"{resume.base}",
                action="the model's state is not loaded, or is loaded and then overwritten: call "
                "model.load_state_dict(checkpoint['model']) after the model is built and before it is trained",
            )
    return enough(judged, "weights bit-equal to those that were saved", compared=count_known(judged))


def optimizer(resumes: Sequence[Resume]) -> Finding:
    """The optimizer's state before the first step is the one that was saved."""
    judged = placed(resumes)
    for resume in judged:
        held, got = resume.held(resume.base + 1), resume.lines[0]
        wrong = [(1, got.state)] if held is not None and held.state != got.state else _later_optimizers(resume)
        for number, state in wrong:
            what = "is empty" if state is None else "is another one"
            return fail(
                f"after {resume.strike} the state of rank {resume.rank}'s optimizer {what} at step "
                f"{resume.base + number}: momentum begins anew",
                action="the optimizer's state is not saved or not loaded: save optimizer.state_dict() and call "
                "optimizer.load_state_dict(...)",
            )
    if judged and all(resume.lines[0].state is None for resume in judged):
        return skip("this optimizer keeps no state", proof="no state at any step, of the undisturbed run either")
    return enough(judged, "optimizer states bit-equal to those that were saved", compared=count_known(judged))


def _later_optimizers(resume: Resume) -> list[tuple[int, str | None]]:
    """Of optimizers that step first in a later step than the first: those whose state, beside the same weights, is
    another one. What others did before moves no state of theirs."""
    seen, wrong = {part.optimizer for part in parts_of(resume.lines[0])}, []
    for number, line in enumerate(resume.lines[1:], 2):
        held = resume.held(resume.base + number)
        for part, other in zip(parts_of(line), parts_of(held) if held else (), strict=False):
            if part.optimizer not in seen and part.weights == other.weights and part.state != other.state:
                wrong.append((number, part.state))
        seen |= {part.optimizer for part in parts_of(line)}
    return wrong


def buffers(resumes: Sequence[Resume], ground: Ground) -> Finding:
    """Buffers at the first step, after its forward, are those that the run had there."""
    judged = placed(resumes)
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
            if right := _right_beside(resume, judged):
                return fail(
                    f"after {resume.strike} buffers of rank {resume.rank}, as BatchNorm's statistics, are not those "
                    f"that it had in step {resume.base + 1}, although those of rank {right.rank} are: each rank has "
                    "buffers of its own, and those of one rank are saved, or loaded, for all",
                    action="let all ranks have the same buffers (DistributedDataParallel with broadcast_buffers=True, "
                    "SyncBatchNorm, or a broadcast before each save), or save and load those of each rank",
                )
            return fail(
                f"after {resume.strike} buffers of rank {resume.rank}, as BatchNorm's statistics, are not those that "
                f"the run had in step {resume.base + 1}: evaluation gives other results",
                action="save model.state_dict(), not only model.parameters(), and load it with strict=True",
            )
    return enough(
        judged, "buffers, as BatchNorm's statistics, bit-equal to those that were saved", compared=count_known(judged)
    )


def _right_beside(wrong: Resume, judged: Sequence[Resume]) -> Resume | None:
    """Another rank of the same start that has the buffers that it had, which were not those of this rank."""
    wanted = wrong.held(wrong.base + 1)
    for one in judged:
        held = one.held(one.base + 1)
        if held is None or wanted is None or (one.strike, one.done) != (wrong.strike, wrong.done):
            continue
        if held.buffers == one.lines[0].buffers and held.buffers != wanted.buffers:
            return one
    return None


def schedule(resumes: Sequence[Resume]) -> Finding:
    """The learning rate of every step is that of the undisturbed run."""
    judged, steps = placed(resumes), 0
    for resume in judged:
        for number, line in enumerate(resume.lines, 1):
            wanted = resume.reference.get(resume.base + number)
            # The rate of the first step is kept in the optimizer's state: lost with it, it is told there.
            if wanted is None or (number == 1 and line.state is None and wanted.state is not None):
                continue
            steps += 1
            if not _close(line.rates, wanted.rates):
                as_what, action = _other_rate(resume, number)
                got, had = next(
                    (pair for pair in zip(line.rates, wanted.rates, strict=False) if not _close(pair[:1], pair[1:])),
                    (line.rates[0], wanted.rates[0]),
                )
                return fail(
                    f"after {resume.strike} the learning rate of step {resume.base + number} is {got:g} "
                    f"instead of {had:g}{as_what}",
                    action=action,
                )
    return enough(judged, f"learning rates right, {steps} steps")


def is_shifted(found: Finding) -> bool:
    """Whether this finding of `schedule` says that the rates are those of steps before or after."""
    return found.action in (_TOO_FEW, _TOO_MANY)


def _other_rate(resume: Resume, number: int) -> tuple[str, str]:
    """Of which step the learning rates are from this one on, in words, and what to do."""
    first = resume.reference.get(number)
    if first is not None and _close(resume.lines[number - 1].rates, first.rates):
        return f", that of step {number}: the schedule began anew", _LOAD_SCHEDULE
    for by in (-1, 1, -2, 2):
        pairs = [(line, resume.reference.get(resume.base + after + by)) for after, line in enumerate(resume.lines, 1)][
            number - 1 :
        ]
        known = [(line, other) for line, other in pairs if other is not None]
        if known and all(_close(line.rates, other.rates) for line, other in known):
            steps = f"{abs(by)} step{'s' * (abs(by) > 1)}"
            words = (
                f", that of step {resume.base + number + by}: the schedule is {steps} {'behind' if by < 0 else 'ahead'}"
            )
            return words, _TOO_FEW if by < 0 else _TOO_MANY
    return "", _LOAD_SCHEDULE


def random_state(resumes: Sequence[Resume], ground: Ground) -> Finding:
    """The random generators go on where they were; or what they draw is of no effect."""
    judged, unused = placed(resumes), set[str]()
    undecided: list[tuple[Resume, list[str]]] = []  # struck again in its first step: no weights tell of an effect
    unknown: list[Resume] = []  # an earlier fault had changed the run, and nobody saw what it held there
    if judged and not ground.random:
        return skip("no generator is seeded", proof="their states differ between the two undisturbed runs")
    for resume in judged:
        held, got = resume.held(resume.base + 1), resume.lines[0]
        # A step of fewer micro-batches draws fewer numbers: told by `accumulation`.
        if held is None and _differ(resume.planned(resume.base + 1), got, ground):
            unknown.append(resume)
        if held is None or lost_in_the_middle(resume, ground):
            continue
        wrong = _differ(held, got, ground)
        if not wrong:
            continue
        pairs = pairs_after(resume)
        if not pairs:
            undecided.append((resume, wrong))
        elif equal(pairs):
            unused.update(wrong)
        else:
            return _another_random_state(resume, wrong)
    for resume, wrong in undecided:
        if not unused.issuperset(wrong):
            return _another_random_state(resume, wrong)
    if unknown:
        first = unknown[0]
        return error(
            f"not judged: after {first.strike} the random state at step {first.base + 1} is not that of the "
            "undisturbed run, and what the struck run held there is not known "
            f"({len(unknown)} of {len(judged)} resumes)",
            action="mend first what failed, then drill again",
        )
    without = f"; that of {' and '.join(sorted(unused))} differs, without effect on any weight" if unused else ""
    return enough(judged, f"random states as they were{without}", compared=count_known(judged))


def _differ(held: Line | None, got: Line, ground: Ground) -> list[str]:
    """Generators of another state."""
    if held is None:
        return []
    return sorted(name for name in ground.random if held.random.get(name) != got.random.get(name))


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
        seen = [(resume, held) for resume in placed(group) if (held := resume.held(resume.base + 1)) is not None]
        wrong = [resume for resume, held in seen if held.state != resume.lines[0].state]
        found += wrong if len(wrong) < len(seen) else []
    return found


def _close(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        abs(one - other) <= 1e-9 * max(abs(one), abs(other)) for one, other in zip(some, others, strict=True)
    )


def _another_random_state(resume: Resume, wrong: Sequence[str]) -> Finding:
    return fail(
        f"after {resume.strike} the random state of {' and '.join(wrong)} in rank {resume.rank} is another one "
        f"at step {resume.base + 1}: dropout, noise and shuffling are not those of the undisturbed run",
        action="save the states (torch.get_rng_state, torch.cuda.get_rng_state_all, random.getstate, "
        "numpy.random.get_state) and set them just before the first step, after the DataLoader is iterated",
    )
