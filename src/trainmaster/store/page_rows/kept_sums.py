"""Sums over attempts that were given back: made once, and again when an attempt or a job has changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from sqlalchemy import Connection, func, select

from trainmaster.store import tables as t
from trainmaster.store.database import Database

T = TypeVar("T")
_MOST = 64  # sums of one database
_ATTEMPTS, _JOBS = t.attempts.c, t.jobs.c
# Of an attempt no other column counts, and each of these is set once or changed with its sum. Who deletes a job writes
# to the audit trail with it: a job like it may follow. 2 ms of 10,000 rows, whose sums take 70.
_COUNTS = select(
    func.count(), func.count(_ATTEMPTS.released_at), func.count(_ATTEMPTS.ended_at),
    func.count(_ATTEMPTS.price_cents_per_hour), func.sum(_ATTEMPTS.price_cents_per_hour),
    select(func.count()).select_from(t.instances).scalar_subquery(), select(func.max(t.audit.c.id)).scalar_subquery(),
)  # fmt: skip
_STATUSES = select(_JOBS.status, func.count()).group_by(_JOBS.status).order_by(_JOBS.status)


class Recall:
    """The sums that hold for what a transaction sees."""

    def __init__(self, db: Database, conn: Connection) -> None:
        self._kept = db.kept
        self._state = (*conn.execute(_COUNTS).one(), *conn.execute(_STATUSES).all())

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key for this state. It is shared: nobody may change it."""
        state, value = self._kept.get(key, (None, None))
        if state == self._state:
            kept: T = value
            return kept
        new = make()
        self._kept.pop(key, None)
        self._kept[key] = (self._state, new)
        for old in list(self._kept)[:-_MOST]:  # a copy: other threads add to it
            self._kept.pop(old, None)
        return new
