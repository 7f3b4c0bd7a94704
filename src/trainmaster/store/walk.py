"""A job's events for those who go over all of them: only what a page needs of each, at a third of the cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Text, select, type_coerce

from trainmaster.core.plan import EVENTS_FILE
from trainmaster.store import tables as t
from trainmaster.store.database import Database

_NOTHING: Mapping[str, Any] = {}


class Told(NamedTuple):
    """What an event says, and where it stands."""

    cursor: tuple[int, int]  # (attempt number, offset), as reads.list_events takes it
    phase: str | None
    event: str | None
    data: Mapping[str, Any]
    fault: str | None
    text: str | None

    @property
    def offset(self) -> int:
        return self.cursor[1]


def walk_events(
    db: Database, job_id: str, *, after: tuple[int, int] | None = None, limit: int, stream: str = EVENTS_FILE
) -> list[Told]:
    """Events of a job in (attempt, offset) order, behind `after`; the same ones as reads.list_events gives."""
    number, offset = after if after is not None else (0, -1)
    found: list[Told] = []
    e, a = t.events.c, t.attempts.c
    # As text: the driver's own bytes are decoded here, without a look at what kind of column each value is of.
    data = e.data if db.engine.dialect.name == "postgresql" else type_coerce(e.data, Text)
    columns = select(e.offset, e.phase, e.event, data, e.fault, e.text).order_by(e.offset)
    with db.read() as conn:
        attempts = select(a.id, a.number).where(a.job_id == job_id, a.number >= number).order_by(a.number)
        for attempt, which in conn.execute(attempts).all():
            query = columns.where(e.attempt == attempt, e.stream == stream)
            if which == number:
                query = query.where(e.offset > offset)
            for at, phase, event, said, fault, text in conn.execute(query.limit(limit - len(found))):
                plain = json.loads(said) if isinstance(said, str) else said
                found.append(Told((which, at), phase, event, plain or _NOTHING, fault, text))
            if len(found) >= limit:
                break
    return found
