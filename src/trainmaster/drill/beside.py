"""Judgement of state beside weights and optimizer: a GradScaler, averaged weights, and what checkpoints hold else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainmaster.core.results import Finding, fail
from trainmaster.drill.ground import Ground, enough, placed
from trainmaster.drill.lives import Resume
from trainmaster.drill.witness_log import Line

_BY_PLACE = (
    "optimizer.load_state_dict gives state, learning rate and weight decay by place: build the groups, and the "
    "parameters in them, in the same order at every start, and not from a set"
)


def order(resumes: Sequence[Resume]) -> Finding | None:
    """Parameters stand in the optimizer in the order that they had: its state is given out by their place.

    None: they do.
    """
    for resume in placed(resumes):
        held, got = resume.held(resume.base + 1), resume.lines[0]
        if held is None or held.weights != got.weights:
            continue
        if held.groups == got.groups:
            if held.state == got.state or not held.states or held.states != got.states:
                continue
            return fail(
                f"after {resume.strike} parameters of rank {resume.rank}'s optimizer have exchanged their states "
                f"in step {resume.base + 1}",
                action=_BY_PLACE,
            )
        what = "its parameters are in another order"
        if sorted(held.groups) == sorted(got.groups):
            at = next(at for at, (one, other) in enumerate(zip(got.groups, held.groups, strict=True)) if one != other)
            what = f"group {at + 1} holds the parameters of what was group {held.groups.index(got.groups[at]) + 1}"
        return fail(
            f"after {resume.strike} the parameter groups of rank {resume.rank}'s optimizer are not those that it had "
            f"in step {resume.base + 1}: {what}",
            action=_BY_PLACE,
        )
    return None


def hyperparameters(resumes: Sequence[Resume], ground: Ground) -> Finding:
    """Weight decay, betas and what else a parameter group has are those of the run."""
    judged, steps = placed(resumes), 0
    compared = set[int]()
    for at, resume in enumerate(judged):
        for number, line in enumerate(resume.lines, 1):
            wanted = resume.held(resume.base + 1) if number == 1 else None
            if wanted is None and ground.repeatable:  # an optimizer may learn them: with other weights they are others
                wanted = resume.reference.get(resume.base + number)
            if wanted is None:
                continue
            compared.add(at)
            # Those of the first step are kept in the optimizer's state: lost with it, it is told there.
            if number == 1 and line.state is None and wanted.state is not None:
                continue
            steps += 1
            if changed := _changed(line, wanted):
                return fail(
                    f"after {resume.strike} {changed} in step {resume.base + number}",
                    action="start with the hyperparameters of the run, and set none after optimizer.load_state_dict, "
                    "which brings those that were saved",
                )
    words = f"weight decay, betas and other hyperparameters right, {steps} steps"
    return enough(judged, words, compared=len(compared))


def _changed(line: Line, wanted: Line) -> str:
    """Which hyperparameters of the first group that has others changed, from what to what; empty: none."""
    if len(line.settings) != len(wanted.settings):
        return f"the optimizer has {len(line.settings)} parameter groups instead of {len(wanted.settings)}"
    for number, (got, had) in enumerate(zip(line.settings, wanted.settings, strict=True), 1):
        names = [name for name in had if name in got and not _same(got[name], had[name])]
        if names:
            of = f" of parameter group {number}" if len(wanted.settings) > 1 else ""
            return ", ".join(f"{name}{of} is {got[name]} instead of {had[name]}" for name in names[:4])
    return ""


def _same(some: Any, other: Any) -> bool:
    if isinstance(some, list) and isinstance(other, list):
        return len(some) == len(other) and all(map(_same, some, other))
    if isinstance(some, float) or isinstance(other, float):
        return isinstance(some, int | float) and isinstance(other, int | float) and math.isclose(some, other)
    return bool(some == other)


def scaler(resumes: Sequence[Resume], ground: Ground) -> Finding | None:
    """The scale of every GradScaler is the one that was saved. None: the program has none."""
    judged = placed(resumes)
    if not any(line.scales for resume in judged for line in (*resume.reference.values(), *resume.lines)):
        return None
    compared = 0
    for resume in judged:
        held, got = resume.held(resume.base + 1), resume.lines[0].scales
        if held is None or (not ground.repeatable and _is_halved(got, held.scales)):
            continue
        compared += 1
        if held.scales == got:
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
    return enough(judged, "scales of the GradScaler as they were saved", compared=compared)


def _is_halved(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    """Whether one of the two had an infinite gradient after the save: such a step is left out, so no line tells of it.

    Where training is not repeatable, the other need not have it.
    """
    pairs = [(one, other) for one, other in zip(some, others, strict=False) if one != other]
    return (
        len(some) == len(others)
        and len(pairs) > 0
        and all(
            (scale == 2 * wanted and wanted_since == 0) or (wanted == 2 * scale and since == 0)
            for (scale, since), (wanted, wanted_since) in pairs
        )
    )


def averages(resumes: Sequence[Resume]) -> Finding | None:
    """The weights of every AveragedModel are those that were saved. None: the program has none."""
    judged = placed(resumes)
    if not any(line.averages for resume in judged for line in (*resume.reference.values(), *resume.lines)):
        return None
    compared = 0
    for resume in judged:
        held, got = resume.held(resume.base + 1), resume.lines[0].averages
        compared += held is not None
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
    return enough(judged, "averaged weights bit-equal to those that were saved", compared=compared)


def saved(resumes: Sequence[Resume], ground: Ground) -> Finding | None:
    """What is saved after a resume is what the undisturbed run saved: averages and losses that a script keeps itself.

    None: nothing of it was seen twice alike.
    """
    compared, entries = 0, set[str]()
    for resume in placed(resumes):
        for number, line in enumerate(resume.lines, 1):
            wanted = resume.reference.get(resume.base + number)
            for name in sorted(ground.saved):
                theirs = {digest for entry, digest in (wanted.saved if wanted else ()) if entry == name}
                got = {digest for entry, digest in line.saved if entry == name}
                if not theirs or not got:  # the best one so far, or the newest
                    continue
                if not got <= theirs:
                    what = f"`{name}` in the checkpoint" if name else "a state_dict"
                    return fail(
                        f"after {resume.strike} the tensors of {what} that rank {resume.rank} saved after step "
                        f"{resume.base + number} are not those that the undisturbed run saved there",
                        action="what they are made of is not saved, or not loaded: restore it before the first step",
                    )
                compared += 1
                entries.add(name or "a state_dict")
    if not compared:
        return None
    return enough(
        placed(resumes), f"what it saves next is what the undisturbed run saved ({', '.join(sorted(entries))})"
    )
