"""Judgement of a drill: one function per guarantee of a killed and resumed run.

Every function takes recorded attempts and returns a finding; nothing here touches the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok, skip
from trainmaster.train.drill.record import Attempt, Samples

TOLERANCE = 1e-3  # of the loss on another number of ranks: sums over other shares of a batch round differently
LOOK = "keep the drill's folder and report it: this is a fault of the trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """Damage done between two attempts: no checkpoint of this step or a newer one is good."""

    step: int
    path: str  # of that step, on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Cost of one kill: from the last step before it to the step that the next attempt resumed from."""

    died_at: int
    resumed_from: int | None  # None: started at step 0
    acknowledged: int | None  # newest step that was said to be saved before, and not damaged since
    began: bool  # False: the attempt that should have resumed died before it could
    tier: str
    bound: int | None  # steps, as the run had said before it died; None: it had said nothing yet
    damaged: bool  # the newest checkpoint was damaged in between

    @property
    def lost(self) -> int:
        return self.died_at - (self.resumed_from or 0)


def list_resumes(attempts: Sequence[Attempt], *, stated: int | None, damaged: Mapping[int, Damaged]) -> list[Resume]:
    """Cost of each kill. `damaged`: attempt number, from 0, before which something was damaged.

    `stated` is the bound that holds before the run has measured one: the interval, where training waits for its saves.

    An attempt that died while it loaded has cost nothing of its own: the next one answers for the steps before both.
    """
    resumes: list[Resume] = []
    saved: list[int] = []  # acknowledged and not taken back, in order
    reached, bound, after_damage = 0, stated, False
    for place, attempt in enumerate(attempts):
        if place:
            if place in damaged:
                saved, after_damage = [step for step in saved if step < damaged[place].step], True
            resumes.append(
                Resume(
                    died_at=reached,
                    resumed_from=attempt.resumed_from,
                    acknowledged=saved[-1] if saved else None,
                    began=attempt.began,
                    tier=attempt.loaded_tier,
                    bound=bound,
                    damaged=after_damage,
                )
            )
        if attempt.began:
            after_damage = False
            # Saves above the step it went on from are of a future that did not happen.
            saved = [step for step in saved if step <= (attempt.resumed_from or 0)]
            reached = attempt.last_step or 0
        saved = sorted({*saved, *attempt.saved})
        bound = attempt.bound_steps or bound
    return resumes


def no_silent_start(resumes: Sequence[Resume]) -> Finding:
    """Where anything was ever saved, nothing starts at step 0."""
    if not (begun := [resume for resume in resumes if resume.began]):
        return error("no attempt came as far as resuming", action="raise steps, or lower checkpoint.every_steps")
    for resume in begun:
        if resume.resumed_from is None and resume.acknowledged is not None:
            return fail(f"started at step 0 although step {resume.acknowledged} was saved", action=LOOK)
    return ok(f"{len(begun)} resumes, none at step 0 with a checkpoint there")


def nothing_acknowledged_is_lost(resumes: Sequence[Resume]) -> Finding:
    """A step that was said to be saved is there to resume from, unless somebody damaged it."""
    for resume in resumes:
        if resume.began and resume.acknowledged is not None and (resume.resumed_from or 0) < resume.acknowledged:
            return fail(
                f"step {resume.acknowledged} was saved and the run went on from {resume.resumed_from}", action=LOOK
            )
    if not any(resume.began and resume.acknowledged is not None for resume in resumes):
        return error("nothing was saved before any kill", action="raise steps, or lower checkpoint.every_steps")
    return ok("every resume went on from the newest step that was said to be saved, or from a newer one")


def allowed_for_damage(every_steps: int) -> int:
    """Steps that damage to the newest checkpoint may cost beyond the bound; no run promises anything of it."""
    return 2 * every_steps


def bounded(resumes: Sequence[Resume], *, every_steps: int) -> Finding:
    """No death cost more than the run had said; where the newest was damaged too, up to two intervals more."""
    judged = [resume for resume in resumes if resume.began and resume.bound is not None]
    if not judged:
        return error("no bound was stated before any kill", action="raise steps: a run states it after its first saves")
    for resume in judged:
        most = (resume.bound or 0) + (allowed_for_damage(every_steps) if resume.damaged else 0)
        if resume.lost > most:
            return fail(f"{resume.lost} steps lost at step {resume.died_at}, stated were at most {most}", action=LOOK)
    parts = []
    if sound := [resume for resume in judged if not resume.damaged]:
        most = max(resume.bound or 0 for resume in sound)
        parts.append(f"{max(resume.lost for resume in sound)} steps lost (at most {most} stated)")
    if after_damage := [resume for resume in judged if resume.damaged]:
        most = max(resume.bound or 0 for resume in after_damage) + allowed_for_damage(every_steps)
        parts.append(
            f"{max(resume.lost for resume in after_damage)} with the newest damaged too (at most {most} allowed)"
        )
    return ok("; ".join(parts), lost=max(resume.lost for resume in judged))


def same_losses(reference: Attempt, attempts: Sequence[Attempt]) -> Finding:
    """Bit-equal, as long as the number of ranks never changed."""
    first = attempts[0].ranks if attempts else reference.ranks
    same = _while_ranks(attempts, first) if first == reference.ranks else []
    resumed = [attempt for attempt in same[1:] if attempt.losses]
    if not resumed:
        return error("no attempt resumed on as many ranks", action="raise steps, so that kills come earlier in the run")
    count, after = 0, 0
    for place, attempt in enumerate(same):
        for step, loss in attempt.losses.items():
            wanted = reference.losses.get(step)
            if loss != wanted:
                return fail(f"step {step}: loss {loss!r} instead of {wanted!r} after {place} resumes", action=LOOK)
            count, after = count + 1, after + (place > 0)
    return ok(f"{count} losses bit-equal, {after} of them after a resume", compared=count, after_resume=after)


def close_losses(reference: Attempt, attempts: Sequence[Attempt]) -> Finding:
    """Within TOLERANCE from the first attempt on that had another number of ranks."""
    rest = attempts[len(_while_ranks(attempts, reference.ranks)) :]
    worst, count = 0.0, 0
    for attempt in rest:
        for step, loss in attempt.losses.items():
            wanted = reference.losses.get(step)
            if wanted is None or not abs(loss - wanted) <= TOLERANCE:
                return fail(f"step {step} on {attempt.ranks} ranks: loss {loss!r} instead of {wanted!r}", action=LOOK)
            worst, count = max(worst, abs(loss - wanted)), count + 1
    if not count:
        return error(
            "no attempt resumed on another number of ranks", action="raise steps, so that kills come earlier in the run"
        )
    return ok(f"{count} losses within {TOLERANCE:g}, worst {worst:.1e}", compared=count, worst=worst)


def same_samples(reference: Attempt, attempts: Sequence[Attempt], *, steps: int) -> Finding:
    """Of the steps that count, every sample was consumed once, in the reference's order."""
    wanted = flatten(reference.samples, 0, steps)
    if not wanted:
        return error("the reference run left no record of its samples", action="see its rank logs")
    counts: dict[int, Mapping[int, str]] = {}
    for attempt in attempts:
        if attempt.began:
            # What was done after the step that it went on from was lost, and counts for nothing.
            start = attempt.resumed_from or 0
            counts = {step: samples for step, samples in counts.items() if step <= start}
            counts |= {step: samples for step, samples in attempt.samples.items() if step > start}
    consumed = flatten(counts, 0, steps)
    if consumed != wanted:
        where = next(
            (i for i, (sample, other) in enumerate(zip(consumed, wanted, strict=False)) if sample != other), None
        )
        if where is None:
            return fail(f"{len(consumed)} samples consumed instead of {len(wanted)}", action=LOOK)
        return fail(f"the {where + 1}th sample was {consumed[where]}, should have been {wanted[where]}", action=LOOK)
    return ok(f"{len(consumed)} samples, each once and in order", samples=len(consumed))


def flatten(samples: Samples, after: int, upto: int) -> list[tuple[int, str]]:
    """The samples of these steps in the order of the run."""
    return [item for step in sorted(samples) if after < step <= upto for item in samples[step].items()]


def ended(attempts: Sequence[Attempt], *, steps: int) -> Finding:
    """The last attempt came to the last step, and said so."""
    last = attempts[-1]
    if set(last.codes) == {0} and last.named("TRAINING", "end") and last.last_step == steps:
        return ok(f"the run ended at step {steps} in its attempt {len(attempts)}")
    return fail(f"the last attempt ended with {list(last.codes)} at step {last.last_step} of {steps}", action=LOOK)


def recovered(reference: Attempt, starts: Sequence[Attempt], *, kills: int, steps: int) -> Finding:
    """A run whose ranks were killed `kills` times in one attempt went on in it, as the undisturbed run did.

    The last of `starts` is a new attempt, because the agent was killed too.
    """
    seconds = [float(data["seconds"]) for start in starts for data in start.named("RECOVERY", "done")]
    begun = sum(len(start.named("RECOVERY", "start")) for start in starts)
    if begun < kills or len(starts) != kills + 2:
        return error(
            f"{begun} of {kills} kills were recovered in place", action="raise steps, or choose another --seed"
        )
    resumes = list_resumes(starts, stated=None, damaged={})
    findings = [
        no_silent_start(resumes),
        nothing_acknowledged_is_lost(resumes),
        same_losses(reference, starts),
        same_samples(reference, starts, steps=steps),
        ended(starts, steps=steps),
    ]
    if bad := [finding for finding in findings if finding.verdict is not Verdict.PASS]:
        return bad[0]
    slowest = f", the slowest within {max(seconds):.1f} s" if seconds else ""
    return ok(
        f"{kills} kills recovered in one attempt{slowest}; the agent killed, and resumed; {findings[2].reason}; "
        f"{findings[3].reason}",
        seconds=seconds,
    )


def rejected(attempts: Sequence[Attempt], damaged: Mapping[int, Damaged]) -> Finding:
    """What was damaged was refused by name, and something else taken."""
    if not damaged:
        return skip("no checkpoint was to be damaged", proof="the plan damages no checkpoint")
    words: list[str] = []
    for place, path in ((place, damage.path) for place, damage in damaged.items()):
        if place >= len(attempts):
            return error(f"attempt {place + 1} did not happen", action="see the attempts before it")
        # An attempt that died while it loaded leaves the damage to the next one.
        attempt = next((later for later in attempts[place:] if later.began), attempts[place])
        loaded = attempt.named("CHECKPOINT", "loaded")
        if path in {str(data.get("path")) for data in loaded}:
            return fail(f"{path} was damaged and has been loaded", action=LOOK)
        refusals = [data for data in attempt.named("CHECKPOINT", "rejected") if str(data.get("path")) == path]
        words += [f"rejected: {data.get('why')}" for data in refusals]
        # With a good copy in another tier the damaged one is not read.
        if not refusals and not any(data.get("tier", "disk") != "disk" for data in loaded):
            return fail(f"{path} was damaged and not rejected", action=LOOK)
    return ok("; ".join(words) or "not needed: another tier had a good copy")


def _while_ranks(attempts: Sequence[Attempt], ranks: int) -> list[Attempt]:
    same = []
    for attempt in attempts:
        if attempt.ranks != ranks:
            break
        same.append(attempt)
    return same


def as_result(name: str, finding: Finding) -> CheckResult:
    return CheckResult(check=name, findings=(finding,), took_s=0.0)
