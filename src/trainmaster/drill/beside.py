"""Judgement of state beside weights and optimizer: a GradScaler, averaged weights, and what checkpoints hold else."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.core.results import Finding, fail
from trainmaster.drill.judge import Ground, _enough, _placed
from trainmaster.drill.lives import Resume


def scaler(resumes: Sequence[Resume]) -> Finding | None:
    """The scale of every GradScaler is the one that was saved. None: the program has none."""
    judged = _placed(resumes)
    if not any(line.scales for resume in judged for line in (*resume.reference.values(), *resume.lines)):
        return None
    for resume in judged:
        held, got = resume.held(resume.base + 1), resume.lines[0].scales
        if held is None or held.scales == got:
            continue
        what = "there is no GradScaler"
        for (scale, since), (wanted, wanted_since) in zip(got, held.scales, strict=False):
            if scale != wanted:
                what = f"the scale of the GradScaler is {scale:g} instead of {wanted:g}"
                break
            if since != wanted_since:
                what = f"the GradScaler counts {since:g} steps without an infinite gradient instead of {wanted_since:g}"
                break
        return fail(
            f"after {resume.strike} {what} in step {resume.base + 1}",
            action="the GradScaler's state is not saved or not loaded: save scaler.state_dict() and call "
            "scaler.load_state_dict(...)",
        )
    return _enough(judged, "scales of the GradScaler as they were saved")


def averages(resumes: Sequence[Resume]) -> Finding | None:
    """The weights of every AveragedModel are those that were saved. None: the program has none."""
    judged = _placed(resumes)
    if not any(line.averages for resume in judged for line in (*resume.reference.values(), *resume.lines)):
        return None
    for resume in judged:
        held, got = resume.held(resume.base + 1), resume.lines[0].averages
        if held is None or held.averages == got:
            continue
        many = [str(sum(n for n, _ in some)) if some else "none" for some in (got, held.averages)]
        what = f", {many[0]} averaged instead of {many[1]}" if many[0] != many[1] else ""
        return fail(
            f"after {resume.strike} the averaged weights (AveragedModel) of rank {resume.rank} are not those that the "
            f"run had in step {resume.base + 1}{what}",
            action="the averaged weights are not saved or not loaded: save averaged.state_dict() and call "
            "averaged.load_state_dict(...)",
        )
    return _enough(judged, "averaged weights bit-equal to those that were saved")


def saved(resumes: Sequence[Resume], ground: Ground) -> Finding | None:
    """What is saved after a resume is what the undisturbed run saved: averages and losses that a script keeps itself.

    None: nothing of it was seen twice alike.
    """
    compared, entries = 0, set[str]()
    for resume in _placed(resumes):
        for number, line in enumerate(resume.lines, 1):
            wanted = resume.reference.get(resume.base + number)
            for name in sorted(ground.saved):
                theirs = {digest for entry, digest in (wanted.saved if wanted else ()) if entry == name}
                got = {digest for entry, digest in line.saved if entry == name}
                if not theirs or not got:  # the best one so far, or the newest
                    continue
                if not got <= theirs:
                    what = f"`{name}`" if name else "the weights"
                    return fail(
                        f"after {resume.strike} the tensors of {what} in the checkpoint that rank {resume.rank} saved "
                        f"after step {resume.base + number} are not those that the undisturbed run saved there",
                        action=f"{what} of the checkpoint is saved and not restored: load it before the first step",
                    )
                compared += 1
                entries.add(name or "weights")
    if not compared:
        return None
    return _enough(
        _placed(resumes), f"what it saves next is what the undisturbed run saved ({', '.join(sorted(entries))})"
    )
