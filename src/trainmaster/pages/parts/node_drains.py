"""The drains of machines that nodes of a page have: by target and name, for another target may have a namesake."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from trainmaster import targets
from trainmaster.store.capacity.machines import MachineRow
from trainmaster.store.nodes import Holder, NodeCheck


def list_targets(checks: Mapping[str, NodeCheck], holders: Iterable[Holder]) -> dict[str, set[str]]:
    """By node: the targets of its newest check and of the open jobs that hold it; else that of the last one there."""
    open_too = {name: {check.target} for name, check in checks.items()}
    last: dict[str, set[str]] = {}
    for holder in holders:
        for node in holder.nodes:
            if holder.open:
                open_too.setdefault(node, set()).add(holder.target)
            else:
                last.setdefault(node, {holder.target})
    return last | open_too


def match(rows: Iterable[MachineRow], words: Mapping[str, Collection[str]]) -> dict[str, MachineRow]:
    """By node: the drain of the machine of this name on one of these targets."""
    return {
        row.machine: row
        for row in rows
        if row.drained_at and any(_is_at(row.place, word) for word in words.get(row.machine, ()))
    }


def explain(row: MachineRow, *, elsewhere: bool) -> str | None:
    """The operator's reason; of a machine `elsewhere`, with the target whose machine it is."""
    return f"on {targets.spell_place(row.place)}: {row.drained}" if elsewhere else row.drained


def _is_at(place: str, word: str) -> bool:
    stated = targets.find_traits(word)
    if stated is None:
        return False
    if stated.here:  # a place for each server's machine, and the machine has its name
        return targets.spell_place(place) == targets.split(word)[1]
    return place == targets.find_place(word)
