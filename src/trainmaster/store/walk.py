"""A job's events for those who go over all of them: only what a page needs of each, at a third of the cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, Text, bindparam, select, type_coerce

from trainmaster.core.plan import EVENTS_FILE
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.reads import ATTEMPTS_FROM

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


def _walk(data: ColumnElement[Any]) -> Select[Any]:
    e = t.events.c
    here = (e.attempt == bindparam("attempt"), e.stream == bindparam("stream"), e.offset > bindparam("after"))
    columns = select(e.offset, e.phase, e.event, data, e.fault, e.text)
    return columns.where(*here).order_by(e.offset).limit(bindparam("most"))


_AS_VALUES = _walk(t.events.c.data)
# As text: the driver's own bytes are decoded here, without a look at what kind of column each value is of.
_AS_TEXT = _walk(type_coerce(t.events.c.data, Text))


def walk_events(
    db: Database, job_id: str, *, after: tuple[int, int] | None = None, limit: int, stream: str = EVENTS_FILE
) -> list[Told]:
    """Events of a job in (attempt, offset) order, behind `after`; the same ones as reads.list_events gives."""
    number, offset = after if after is not None else (0, -1)
    found: list[Told] = []
    query = _AS_VALUES if db.engine.dialect.name == "postgresql" else _AS_TEXT
    with db.read() as conn:
        for attempt, which in conn.execute(ATTEMPTS_FROM, {"job": job_id, "number": number}).all():
            place = {"attempt": attempt, "stream": stream, "after": offset if which == number else -1}
            for row in conn.execute(query, {**place, "most": limit - len(found)}):
                at, phase, event, said, fault, text = row
                plain = json.loads(said) if isinstance(said, str) else said
                found.append(Told((which, at), phase, event, plain or _NOTHING, fault, text))
            if len(found) >= limit:
                break
    return found
