"""Event lines: append to a stream, list, scan.

Lines go straight to the driver, without SQLAlchemy's conversion of each value: three times as fast, the same rows (a
test compares them).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    Text,
    bindparam,
    func,
    select,
    type_coerce,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from trainmaster.core.events import Line
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.projection import project
from trainmaster.store.rows import EventRow, StreamRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New lines of one attempt, which begin where its stream is acknowledged."""

    job_id: str
    attempt: str
    lines: Sequence[Line]
    inside: bool


def append_chunks(conn: Connection, chunks: Sequence[Chunk]) -> list[bool]:
    """`append_events` for many attempts in one transaction: for each, whether it was kept or somebody was first."""
    s = t.streams.c
    names = [chunk.attempt for chunk in chunks]
    query = select(s.attempt, s.offset).where(s.attempt.in_(names), s.stream == EVENTS_FILE)
    known = {row.attempt: row.offset for row in conn.execute(query.order_by(s.attempt).with_for_update())}
    fresh = [chunk for chunk in chunks if known.get(chunk.attempt) == chunk.lines[0].offset]
    if fresh:
        _append(conn, fresh)
    kept = {chunk.attempt for chunk in fresh}
    return [
        # The first lines of a stream have no row to compare with; it is made with them.
        append_events(
            conn, chunk.attempt, EVENTS_FILE, seen_offset=chunk.lines[0].offset, lines=chunk.lines, inside=chunk.inside
        )
        if chunk.attempt not in known
        else chunk.attempt in kept
        for chunk in chunks
    ]


def append_events(
    conn: Connection, attempt: str, stream: str, *, seen_offset: int, lines: Sequence[Line], inside: bool = False
) -> bool:
    """Keep lines that begin at the offset we saw, what they say of the training, and move the offset behind them.

    False, and nothing is changed, if another reader has already moved it.
    """
    if not lines:
        return True
    assert lines[0].offset == seen_offset, "the lines do not begin where the stream was acknowledged"
    end = lines[-1].offset + lines[-1].length
    at = datetime.now(UTC)
    if not _acknowledge(conn, attempt, stream, seen=seen_offset, end=end, inside=inside, at=at):
        return False
    # An agent that only says that it is alive does not say that the work goes on.
    if any(line.event is None or line.event.phase != "HEARTBEAT" for line in lines):
        job = t.jobs.c.id == select(t.attempts.c.job_id).where(t.attempts.c.id == attempt).scalar_subquery()
        conn.execute(update(t.jobs).where(job).values(heard_at=at, stalled_at=None))
    insert_lines(conn, attempt, stream, lines)
    project(conn, attempt, stream, lines)
    return True


def _acknowledge(
    conn: Connection, attempt: str, stream: str, *, seen: int, end: int, inside: bool, at: datetime
) -> bool:
    row = update(t.streams).where(t.streams.c.attempt == attempt, t.streams.c.stream == stream)
    moved = conn.execute(row.where(t.streams.c.offset == seen).values(offset=end, inside=inside, heard_at=at))
    if moved.rowcount == 1:
        return True
    if seen != 0:
        return False
    # A stream's first lines. Should another reader write the same row now, one of us finds it there and gives way.
    dialect = sqlite if conn.dialect.name == "sqlite" else postgresql
    first = dialect.insert(t.streams).values(attempt=attempt, stream=stream, offset=end, inside=inside, heard_at=at)
    return conn.execute(first.on_conflict_do_nothing().returning(t.streams.c.offset)).first() is not None


_ACKNOWLEDGE = (
    update(t.streams)
    .where(t.streams.c.attempt == bindparam("key"), t.streams.c.stream == EVENTS_FILE)
    .values(offset=bindparam("end"), inside=bindparam("within"), heard_at=bindparam("at"))
)


_HEAR = update(t.jobs).where(t.jobs.c.id == bindparam("key")).values(heard_at=bindparam("at"), stalled_at=None)


def _append(conn: Connection, chunks: Sequence[Chunk]) -> None:
    at = datetime.now(UTC)
    ends = [chunk.lines[-1].offset + chunk.lines[-1].length for chunk in chunks]
    moved = [{"key": c.attempt, "end": end, "within": c.inside, "at": at} for c, end in zip(chunks, ends, strict=True)]
    conn.execute(_ACKNOWLEDGE, moved)
    # An agent that only says that it is alive does not say that the work goes on.
    heard = [c for c in chunks if any(line.event is None or line.event.phase != "HEARTBEAT" for line in c.lines)]
    if heard:
        conn.execute(_HEAR, [{"key": chunk.job_id, "at": at} for chunk in heard])
    insert_many(conn, [(chunk.attempt, EVENTS_FILE, chunk.lines) for chunk in chunks])
    for chunk in chunks:
        project(conn, chunk.attempt, EVENTS_FILE, chunk.lines, job_id=chunk.job_id)


def find_stream(db: Database, attempt: str, stream: str) -> StreamRow:
    """How far a stream has been read; from its start where it never was."""
    query = select(t.streams).where(t.streams.c.attempt == attempt, t.streams.c.stream == stream)
    with db.read() as conn:
        row = conn.execute(query).mappings().first()
    return StreamRow(**row) if row is not None else StreamRow(attempt=attempt, stream=stream, offset=0, inside=False)


_ATTEMPTS_FROM = (
    select(t.attempts.c.id, t.attempts.c.number)
    .where(t.attempts.c.job_id == bindparam("job"), t.attempts.c.number >= bindparam("number"))
    .order_by(t.attempts.c.number)
)


_EVENTS = (
    select(t.events)
    .where(
        t.events.c.attempt == bindparam("attempt"),
        t.events.c.stream == bindparam("stream"),
        t.events.c.offset > bindparam("after"),
    )
    .order_by(t.events.c.offset)
    .limit(bindparam("most"))
)


def list_events(
    db: Database,
    job_id: str,
    *,
    phase: str | None = None,
    after: tuple[int, int] | None = None,
    limit: int = 1000,
    stream: str = EVENTS_FILE,
) -> list[EventRow]:
    """Events of a job in (attempt, offset) order, those behind `after` (attempt number, offset) where it is given."""
    number, offset = after if after is not None else (0, -1)
    found: list[EventRow] = []
    query = _EVENTS if phase is None else _EVENTS.where(t.events.c.phase == phase)
    with db.read() as conn:
        # Attempt by attempt, each a walk along the key: a join would sort the whole job to give its first page.
        for attempt, which in conn.execute(_ATTEMPTS_FROM, {"job": job_id, "number": number}).all():
            place = {"attempt": attempt, "stream": stream, "after": offset if which == number else -1}
            found += [_event(row) for row in conn.execute(query, {**place, "most": limit - len(found)}).mappings()]
            if len(found) >= limit:
                break
    return found


class ScannedEvent(NamedTuple):
    """What an event says, and where it stands."""

    cursor: tuple[int, int]  # (attempt number, offset), as list_events takes it
    phase: str | None
    event: str | None
    data: Mapping[str, Any]
    fault: str | None
    text: str | None

    @property
    def offset(self) -> int:
        return self.cursor[1]


def _scan(data: ColumnElement[Any]) -> Select[Any]:
    e = t.events.c
    here = (e.attempt == bindparam("attempt"), e.stream == bindparam("stream"), e.offset > bindparam("after"))
    columns = select(e.offset, e.phase, e.event, data, e.fault, e.text)
    return columns.where(*here).order_by(e.offset).limit(bindparam("most"))


_AS_VALUES = _scan(t.events.c.data)


# As text: the driver's own bytes are decoded here, without a look at what kind of column each value is of.
_AS_TEXT = _scan(type_coerce(t.events.c.data, Text))


def scan_events(
    db: Database, job_id: str, *, after: tuple[int, int] | None = None, limit: int, stream: str = EVENTS_FILE
) -> list[ScannedEvent]:
    """Events of a job in (attempt, offset) order, behind `after`; the same ones as list_events gives."""
    number, offset = after if after is not None else (0, -1)
    found: list[ScannedEvent] = []
    query = _AS_VALUES if db.engine.dialect.name == "postgresql" else _AS_TEXT
    with db.read() as conn:
        for attempt, which in conn.execute(_ATTEMPTS_FROM, {"job": job_id, "number": number}).all():
            place = {"attempt": attempt, "stream": stream, "after": offset if which == number else -1}
            for row in conn.execute(query, {**place, "most": limit - len(found)}):
                at, phase, event, said, fault, text = row
                plain = json.loads(said) if isinstance(said, str) else said
                found.append(ScannedEvent((which, at), phase, event, plain or {}, fault, text))
            if len(found) >= limit:
                break
    return found


def find_event(db: Database, attempt: str, *, phase: str, event: str, stream: str = EVENTS_FILE) -> EventRow | None:
    """The last such event of an attempt."""
    c = t.events.c
    query = select(t.events).where(c.attempt == attempt, c.stream == stream, c.phase == phase, c.event == event)
    with db.read() as conn:
        row = conn.execute(query.order_by(c.offset.desc()).limit(1)).mappings().first()
    return _event(row) if row is not None else None


def _last_events() -> Select[Any]:
    e, later = t.events, t.events.alias("later")
    stream: BindParameter[str] = bindparam("stream")
    # A maximum per attempt is one step down the index; GROUP BY would walk every event of the phase.
    newest = (
        select(func.max(later.c.offset))
        .where(later.c.attempt == t.attempts.c.id, later.c.stream == stream, later.c.phase == bindparam("phase"))
        .scalar_subquery()
    )
    return (
        select(t.attempts.c.job_id, e)
        .select_from(t.attempts)
        .join(e, (e.c.attempt == t.attempts.c.id) & (e.c.stream == stream) & (e.c.offset == newest))
        .where(t.attempts.c.job_id.in_(bindparam("jobs", expanding=True)))
        .order_by(t.attempts.c.number)
    )


_LAST_EVENTS = _last_events()


def last_event(db: Database, job_ids: Sequence[str], *, phase: str, stream: str = EVENTS_FILE) -> dict[str, EventRow]:
    """The newest event of a phase for each of these jobs that has one: one query, however long the streams are."""
    with db.read() as conn:
        asked = {"jobs": job_ids, "stream": stream, "phase": phase}
        rows = [dict(row) for row in conn.execute(_LAST_EVENTS, asked).mappings()]
    return {row.pop("job_id"): _event(row) for row in rows}  # a later attempt replaces an earlier one


def count_faults(db: Database, job_id: str) -> int:
    """Lines of a job's streams with something wrong in them."""
    query = (
        select(func.count())
        .select_from(t.attempts.join(t.events, t.events.c.attempt == t.attempts.c.id))
        .where(t.attempts.c.job_id == job_id, t.events.c.fault.is_not(None))
    )
    with db.read() as conn:
        return conn.execute(query).scalar_one()


def _event(row: RowMapping | dict[str, Any]) -> EventRow:
    empty: Mapping[str, Any] = {}
    return EventRow(**{**row, "data": row["data"] or empty, "extra": row["extra"] or empty})


_COLUMNS = (
    "attempt", "stream", "offset", "length", "ts", "seq", "phase", "event", "iteration", "epoch", "data", "extra",
    "fault", "text",
)  # fmt: skip


_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def insert_lines(conn: Connection, attempt: str, stream: str, lines: Sequence[Line]) -> None:
    """One row for each line."""
    insert_many(conn, [(attempt, stream, lines)])


def insert_many(conn: Connection, streams: Sequence[tuple[str, str, Sequence[Line]]]) -> None:
    """One row for each line of several streams, each given with its attempt and name."""
    sqlite = conn.dialect.name == "sqlite"
    time = _sqlite_time if sqlite else _same
    rows = [_row(attempt, stream, line, time=time) for attempt, stream, lines in streams for line in lines]
    conn.exec_driver_sql(_SQLITE if sqlite else _POSTGRESQL, rows)


def _row(attempt: str, stream: str, line: Line, *, time: Any) -> tuple[Any, ...]:
    event = line.event
    if event is None:
        return (attempt, stream, line.offset, line.length, *_NOTHING, line.fault, line.text)
    data = line.data_json or (_to_json(event.data) if event.data else None)
    return (
        attempt, stream, line.offset, line.length, event.ts and time(event.ts), event.seq, event.phase, event.event,
        event.iteration, event.epoch, data, _to_json(event.extra) if event.extra else None, line.fault, line.text,
    )  # fmt: skip


_NOTHING = (None,) * 8


_NAMES = ", ".join(f'"{name}"' for name in _COLUMNS)


_SQLITE = f"INSERT INTO events ({_NAMES}) VALUES ({', '.join('?' for _ in _COLUMNS)})"  # noqa: S608 (our own names)


_HOLDERS = ", ".join("%s::jsonb" if name in ("data", "extra") else "%s" for name in _COLUMNS)


_POSTGRESQL = f"INSERT INTO events ({_NAMES}) VALUES ({_HOLDERS})"  # noqa: S608 (our own names)


def _sqlite_time(when: datetime) -> str:
    return when.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")


def _same(when: datetime) -> datetime:
    return when
