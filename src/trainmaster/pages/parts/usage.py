"""What projects, persons and targets used: GPU hours, and money as far as prices are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from trainmaster import targets
from trainmaster.api.costs import Cost, SpendingLine
from trainmaster.core.money.cost import Amount, round_cents
from trainmaster.core.states import Status
from trainmaster.store.costs import GroupSum


def list_lines(groups: Sequence[GroupSum], key: Callable[[GroupSum], str | None]) -> tuple[SpendingLine, ...]:
    """A line for each key, the dearest first; where nothing has a price, the one with the most GPU hours."""
    by_name: dict[str | None, list[GroupSum]] = {}
    for group in groups:
        by_name.setdefault(key(group), []).append(group)
    whole = add_groups(groups)[0]
    lines = [line_of(name, part, whole=whole) for name, part in by_name.items()]
    return tuple(sorted(lines, key=lambda line: (-line.known_cents, -line.gpu_hours, line.name or "")))


def by_project(group: GroupSum) -> str | None:
    return group.project


def by_person(group: GroupSum) -> str | None:
    return group.person


def by_target(group: GroupSum) -> str | None:
    return targets.split(group.target)[1]


def line_of(name: str | None, groups: Sequence[GroupSum], *, whole: float) -> SpendingLine:
    """The sum of these groups. `whole`: the cents that its share is of."""
    known, unknown = add_groups(groups)
    return SpendingLine(
        name=name,
        known_cents=round_cents(known),
        unknown_parts=unknown,
        attempts=sum(group.attempts for group in groups),
        share=known / whole if whole else 0.0,
        gpu_hours=math.fsum(group.gpu_hours for group in groups),
    )


def add_groups(groups: Iterable[GroupSum]) -> tuple[float, int]:
    """Known cents, and attempts without a price."""
    known, unknown = 0.0, 0
    for group in groups:
        known += group.amount.known_cents
        unknown += group.amount.unknown
    return known, unknown


def cost_of(groups: Iterable[GroupSum], status: Status, *, limited: bool = False) -> Cost:
    """What the jobs of this status have cost; those that a budget or a time limit ended are asked for by themselves."""
    chosen = (group for group in groups if group.status == status.value and group.limited == limited)
    known, unknown = add_groups(chosen)
    return Cost(cents=None if unknown else round_cents(known), known_cents=round_cents(known), unknown_parts=unknown)


def sum_up(groups: Iterable[GroupSum]) -> Amount:
    """The same as an amount."""
    known, unknown = add_groups(groups)
    return Amount(known_cents=known, unknown=unknown)
