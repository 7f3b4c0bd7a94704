"""Counts of nodes by verdict and of devices by target, for whoever watches the server from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainmaster import targets
from trainmaster.core.results import Verdict
from trainmaster.pages.node_map import newer, newest_entries
from trainmaster.pages.parts import node_standing
from trainmaster.pages.parts.node_journal import moment_of, read_history, read_out
from trainmaster.store import nodes
from trainmaster.store.capacity import devices, machines
from trainmaster.store.database import Database

UNCHECKED = "unchecked"
MOST_TARGETS = 20  # with labels of their own: those with the most devices
OTHERS = "(other)"


@dataclass(slots=True, kw_only=True)
class DeviceCounts:
    """Devices of one kind at one target. A free one can be given to a job now."""

    total: int = 0
    used: int = 0  # by a job, or by a program that is not a job
    free: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCounts:
    """The machines of a server: nodes by verdict and whether they are drained, devices by target and kind."""

    nodes: Mapping[tuple[str, bool], int]
    drained_s: float  # since the one was drained that has been for longest
    devices: Mapping[tuple[str, str], DeviceCounts]


def read(db: Database, *, home: Path, now: datetime | None = None) -> MachineCounts:
    """Count them. The nodes are those of /nodes, without rented machines that were returned."""
    now, history = now or datetime.now(UTC), read_history(home)
    with db.read() as conn:
        standing = node_standing.read(conn, history, project=None)
        returned = nodes.list_returned(conn)
        checks = {
            name: check for name, check in nodes.list_newest_checks(conn).items() if check.attempt not in returned
        }
    rows, closed = devices.list_devices(db), machines.list_machines(db)
    journal = newest_entries(history)
    since = {name: moment_of(at) for name, at in read_out(home).items()}
    since |= {row.machine: row.drained_at for row in closed if row.drained is not None}
    counts = Counter(
        {(word, out): 0 for word in (*(each.value for each in Verdict), UNCHECKED) for out in (False, True)}
    )
    for name in {*checks, *journal, *since, *(row.machine for row in rows)}:
        newest, _ = newer(checks.get(name), journal.get(name, ()))
        verdict, _ = node_standing.judge(newest, standing.get(name, []) if newest is not None else [])
        counts[verdict.value if verdict is not None else UNCHECKED, name in since] += 1
    longest = max(((now - at).total_seconds() for at in since.values() if at is not None), default=0.0)
    shut = {(row.place, row.machine) for row in closed}
    by_target: dict[tuple[str, str], DeviceCounts] = {}
    for row in rows:
        held = by_target.setdefault((targets.spell_place(row.place), row.kind), DeviceCounts())
        used = row.attempt is not None or row.used is not None
        held.total, held.used = held.total + 1, held.used + used
        held.free += not used and (row.place, row.machine) not in shut
    return MachineCounts(nodes=counts, drained_s=max(0.0, longest), devices=_bounded(by_target))


def _bounded(counts: Mapping[tuple[str, str], DeviceCounts]) -> dict[tuple[str, str], DeviceCounts]:
    """The largest targets by name, the rest together."""
    sizes = Counter[str]()
    for (name, _), held in counts.items():
        sizes[name] += held.total
    own = set(sorted(sizes, key=lambda name: (-sizes[name], name))[:MOST_TARGETS])
    bounded: dict[tuple[str, str], DeviceCounts] = {}
    for (name, kind), held in counts.items():
        sums = bounded.setdefault((name if name in own else OTHERS, kind), DeviceCounts())
        sums.total, sums.used, sums.free = sums.total + held.total, sums.used + held.used, sums.free + held.free
    return bounded
