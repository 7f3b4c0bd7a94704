"""Machines that get no jobs for a while because the newest pre-flight on them failed.

A free machine with a fault would take one waiting job after the other and fail each within seconds. It is tried again
after a while by itself: only a pre-flight can say that it is healthy. Where every machine failed none is held back: the
fault may be one of the jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from sqlalchemy import Connection, select

from trainmaster.core.results import Verdict
from trainmaster.store import nodes
from trainmaster.store import tables as t
from trainmaster.store.capacity.devices import DeviceRow
from trainmaster.store.capacity.machines import MachineRow

HOLD = timedelta(minutes=15)
_LONGEST = timedelta(hours=1)  # of a pre-flight: one that began longer ago is over
_NAMED = 3


def find_held(
    conn: Connection, devices: Iterable[DeviceRow], closed: Iterable[MachineRow], *, now: datetime
) -> Mapping[str, str]:
    """By machine of one place: why it gets no jobs now."""
    names, shut = {row.machine for row in devices}, {row.machine for row in closed}
    if len(names) < 2:
        return {}
    c, a = t.check_results.c, t.attempts.c
    lately = select(a.id).where(a.created_at > now - HOLD - _LONGEST)  # few: not all that ever failed
    failed = select(c.node).where(c.attempt.in_(lately), c.verdict == Verdict.FAIL.value).distinct()
    bad = names.intersection(conn.execute(failed).scalars())
    held: dict[str, str] = {}
    for name, check in nodes.list_newest_checks(conn, nodes=bad).items() if bad else ():
        until = min(check.at or check.placed_at, now) + HOLD
        if check.worst is Verdict.FAIL and until > now:
            which = _name_failed(conn, check)
            held[name] = f"held back until {until:%H:%M} UTC: its newest pre-flight failed ({which})"
    return held if names - shut - held.keys() else {}


def _name_failed(conn: Connection, check: nodes.NodeCheck) -> str:
    c = t.check_results.c
    query = select(c.check).where(c.attempt == check.attempt, c.node == check.node, c.verdict == Verdict.FAIL.value)
    names = conn.execute(query.order_by(c.id)).scalars().all()
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
