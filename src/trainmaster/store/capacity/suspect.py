"""Machines whose newest pre-flight failed a short while ago: the queue gives them out last.

A free machine with a fault would take one waiting job after the other and fail each within seconds. It is not closed to
jobs: what a pre-flight fails is also what a spec expects, and a job must not be able to take a machine from the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from sqlalchemy import Connection, select

from trainmaster.core.results import Verdict
from trainmaster.store import nodes
from trainmaster.store import tables as t
from trainmaster.store.capacity.devices import DeviceRow

LASTS = timedelta(minutes=15)
_LONGEST = timedelta(hours=1)  # of a pre-flight: one that began longer ago is over


def find_suspects(conn: Connection, devices: Iterable[DeviceRow], *, now: datetime) -> Collection[str]:
    """Machines of one place that jobs get last now."""
    names = {row.machine for row in devices}
    if len(names) < 2:
        return ()
    c, a = t.check_results.c, t.attempts.c
    lately = select(a.id).where(a.created_at > now - LASTS - _LONGEST)  # few: not all that ever failed
    failed = select(c.node).where(c.attempt.in_(lately), c.verdict == Verdict.FAIL.value).distinct()
    bad = names.intersection(conn.execute(failed).scalars())
    newest = nodes.list_newest_checks(conn, nodes=bad) if bad else {}
    return [name for name, check in newest.items() if check.worst is Verdict.FAIL and _at(check, now) > now - LASTS]


def _at(check: nodes.NodeCheck, now: datetime) -> datetime:
    """When it was made; by our own clock where that of the node is ahead."""
    return check.at if check.at is not None and check.at <= now else check.placed_at
