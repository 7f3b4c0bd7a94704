"""Rows that curves are drawn from: metrics of steps, evaluations and saved checkpoints, all of them or a sample.

A sample costs the same however long a run is: the index on (attempt, stream, phase, offset) is entered once for each
of some hundred places that are evenly apart in bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Integer, Select, Text, bindparam, cast, func, literal, select, type_coerce

from trainmaster.core.plan import EVENTS_FILE
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.events import ATTEMPTS_FROM, ScannedEvent

PHASES = ("STEP", "EVAL_MODEL", "CHECKPOINT")
_RARE = ("PROJECT", "PREFLIGHT", "TRAINING", "EVAL_MODEL", "CHECKPOINT", "WATCH", "START", "RECOVERY")
_LEAST = 8  # rows of an attempt in a sample
_MOST_RARE = 2000  # events of one rare phase of an attempt, the newest


class Figures(NamedTuple):
    """One row: where it stands, when it was written, and what it says."""

    cursor: tuple[int, int]  # (attempt number, offset)
    ts: datetime | None
    phase: str
    event: str | None
    data: Mapping[str, Any]


def scan_figures(db: Database, job_id: str, *, after: tuple[int, int] | None, limit: int) -> list[Figures]:
    """Rows of a job in (attempt, offset) order, behind `after`."""
    number, offset = after if after is not None else (0, -1)
    e = t.events.c
    query = (
        _columns(db.engine.dialect.name, e.ts)
        .where(e.phase.in_(PHASES), e.offset > bindparam("after"))
        .order_by(e.offset)
        .limit(bindparam("most"))
    )
    rows: list[Figures] = []
    with db.read() as conn:
        for attempt, which in conn.execute(ATTEMPTS_FROM, {"job": job_id, "number": number}).all():
            place = {"attempt": attempt, "after": offset if which == number else -1, "most": limit - len(rows)}
            for at, phase, event, data, ts in conn.execute(query, place):
                rows.append(Figures((which, at), ts, phase, event, _plain(data)))
            if len(rows) >= limit:
                break
    return rows


def sample_steps(db: Database, job_id: str, *, count: int, phase: str = "STEP") -> list[Figures]:
    """About `count` rows of a phase over all attempts, evenly apart in their files, with the first and last of each."""
    rows: list[Figures] = []
    chosen = _chosen(db.engine.dialect.name)
    with db.read() as conn:
        tried = conn.execute(ATTEMPTS_FROM, {"job": job_id, "number": 0}).all()
        each = max(_LEAST, count // max(1, len(tried)))
        for attempt, which in tried:
            place = {"attempt": attempt, "count": each, "phase": phase}
            for at, name, event, data, ts in conn.execute(chosen, place).all():
                rows.append(Figures((which, at), ts, name, event, _plain(data)))
    return rows


def sample_events(db: Database, job_id: str, *, count: int) -> list[ScannedEvent]:
    """Every event of the rare phases, and a sample of the steps: what a page of a long run is first drawn from."""
    e = t.events.c
    query = _columns(db.engine.dialect.name, e.ts).where(e.phase == bindparam("phase"))
    query = query.order_by(e.offset.desc()).limit(_MOST_RARE)
    rows = [*sample_steps(db, job_id, count=count)]
    with db.read() as conn:
        for attempt, which in conn.execute(ATTEMPTS_FROM, {"job": job_id, "number": 0}).all():
            for phase in _RARE:
                for at, name, event, data, ts in conn.execute(query, {"attempt": attempt, "phase": phase}):
                    rows.append(Figures((which, at), ts, name, event, _plain(data)))
    rows.sort(key=lambda row: row.cursor)
    return [ScannedEvent(row.cursor, row.phase, row.event, row.data, None, None) for row in rows]


def measure_events(db: Database, job_id: str) -> int:
    """Bytes of events that a job has, from what was acknowledged of its streams: one row for each attempt."""
    query = (
        select(func.coalesce(func.sum(t.streams.c.offset), 0))
        .select_from(t.streams.join(t.attempts, t.attempts.c.id == t.streams.c.attempt))
        .where(t.attempts.c.job_id == job_id, t.streams.c.stream == EVENTS_FILE)
    )
    return int(db.scalar(query))


def _columns(dialect: str, ts: Any) -> Select[Any]:
    e = t.events.c
    # As text where the driver would decode it again: see store/events.py.
    data = e.data if dialect == "postgresql" else type_coerce(e.data, Text)
    here = (e.attempt == bindparam("attempt"), e.stream == EVENTS_FILE)
    return select(e.offset, e.phase, e.event, data, ts).where(*here)


def _places() -> Select[Any]:
    """Offsets of a phase: the first one behind each of `count` even places, and the last one."""
    steps = t.events.alias("steps")
    here = (steps.c.attempt == bindparam("attempt"), steps.c.stream == EVENTS_FILE, steps.c.phase == bindparam("phase"))
    # Each alone is one step down the index; together they would walk all of it.
    low, high = (select(end(steps.c.offset)).where(*here).scalar_subquery() for end in (func.min, func.max))
    ends = select(low.label("low"), high.label("high")).cte()
    marks = select(literal(0, Integer).label("k")).cte("marks", recursive=True)
    marks = marks.union_all(select(marks.c.k + 1).where(marks.c.k < cast(bindparam("count"), Integer)))
    width = ends.c.high - ends.c.low
    place = ends.c.low + width * marks.c.k // cast(bindparam("count"), Integer)
    behind = select(func.min(steps.c.offset)).where(*here, steps.c.offset >= place).correlate(marks, ends)
    return select(behind.scalar_subquery()).select_from(marks.join(ends, literal(True)))


@functools.cache
def _chosen(dialect: str) -> Select[Any]:
    """The rows at those places; put together once, because a chart asks for each of its runs."""
    e = t.events.c
    return _columns(dialect, e.ts).where(e.offset.in_(_places())).order_by(e.offset)


def _plain(data: Any) -> Mapping[str, Any]:
    plain = json.loads(data) if isinstance(data, str) else data
    return plain if isinstance(plain, dict) else {}
