"""Event lines: append to a stream, list, scan.

Lines go straight to the driver, without SQLAlchemy's conversion of each value: three times as fast, the same rows (a
test compares them).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
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

from trainmaster.api.events import Event
from trainmaster.core.events import Line, render
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.store import tables as t
from trainmaster.store.capacity.event_quota import weigh
from trainmaster.store.columns import upsert
from trainmaster.store.database import Database, is_unavailable
from trainmaster.store.projection import PHASES, StreamLines, project, project_many
from trainmaster.store.rows import StreamRow

_FAULT_CHARACTERS = 300
_TEXT_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New lines of one stream, from its acknowledged offset on."""

    attempt: str
    lines: Sequence[Line]
    inside: bool = False  # the end lies inside a line too long to be kept whole
    job_id: str | None = None  # None: looked up
    stream: str = EVENTS_FILE
    tail: bytes | None = None  # last bytes of the file before the new offset; None: not known
    base: int | None = None  # offset at which a new file begins; None: still the same file
    silent: bool = False  # the offset moves on and no line is kept

    @property
    def key(self) -> tuple[str, str]:
        return self.attempt, self.stream


def append_events(
    conn: Connection, attempt: str, stream: str, *, seen_offset: int, lines: Sequence[Line], inside: bool = False
) -> bool:
    """Append lines of one stream; False, and nothing is changed, if another reader has moved its offset."""
    if not lines:
        return True
    assert lines[0].offset == seen_offset, "the lines do not begin at the acknowledged offset"
    return append_chunks(conn, [Chunk(attempt=attempt, stream=stream, lines=lines, inside=inside)])[0]


def append_chunks(conn: Connection, chunks: Sequence[Chunk]) -> list[bool]:
    """Append lines of many streams with their offsets and derived records; for each, False if another was first.

    The only function that adds events. A line that the database refuses is stored as a fault, so that the stream goes
    on behind it.
    """
    names = list({chunk.attempt: None for chunk in chunks})
    offsets = _offsets(conn, names)
    if new := [{"attempt": c.attempt, "stream": c.stream} for c in chunks if c.key not in offsets]:
        # Two readers may insert the same row: the second waits for the first and then reads its offset.
        conn.execute(upsert(conn.dialect.name, t.streams, ("attempt", "stream")), [{**row, **_UNREAD} for row in new])
        offsets = _offsets(conn, names)
    fresh = [chunk for chunk in chunks if offsets[chunk.key] == chunk.lines[0].offset]
    if fresh:
        _acknowledge(conn, fresh)
    if kept := [chunk for chunk in fresh if not chunk.silent]:
        _insert(conn, kept)
        _project(conn, kept)
    stored = {chunk.key for chunk in fresh}
    return [chunk.key in stored for chunk in chunks]


_UNREAD = {"offset": 0, "inside": False, "base": 0, "kept": 0}


def _offsets(conn: Connection, attempts: Sequence[str]) -> dict[tuple[str, str], int]:
    return {(row.attempt, row.stream): row.offset for row in conn.execute(_OFFSETS, {"attempts": attempts})}


_S = t.streams.c
_NAMED = select(_S.attempt, _S.stream, _S.offset).where(_S.attempt.in_(bindparam("attempts", expanding=True)))
_OFFSETS = _NAMED.order_by(_S.attempt, _S.stream).with_for_update()


_STREAM = (t.streams.c.attempt == bindparam("of_attempt"), t.streams.c.stream == bindparam("of_stream"))
_MOVE = (
    update(t.streams)
    .where(*_STREAM)
    .values(
        offset=bindparam("end"),
        inside=bindparam("within"),
        heard_at=bindparam("at"),
        tail=bindparam("last"),
        kept=t.streams.c.kept + bindparam("more"),
    )
)
_FIND_STREAM = select(t.streams).where(*_STREAM)
_REBASE = update(t.streams).where(*_STREAM).values(base=bindparam("start"))
_HEAR = update(t.jobs).where(t.jobs.c.id == bindparam("key")).values(heard_at=bindparam("at"), stalled_at=None)
_HEAR_ATTEMPT = (
    update(t.jobs)
    .where(t.jobs.c.id == select(t.attempts.c.job_id).where(t.attempts.c.id == bindparam("key")).scalar_subquery())
    .values(heard_at=bindparam("at"), stalled_at=None)
)


def _acknowledge(conn: Connection, chunks: Sequence[Chunk]) -> None:
    at = datetime.now(UTC)
    conn.execute(
        _MOVE,
        [
            {
                "of_attempt": chunk.attempt,
                "of_stream": chunk.stream,
                "end": chunk.lines[-1].offset + chunk.lines[-1].length,
                "within": chunk.inside,
                "last": chunk.tail.hex() if chunk.tail is not None else None,
                "at": at,
                "more": 0 if chunk.silent else sum(map(weigh, chunk.lines)),
            }
            for chunk in chunks
        ],
    )
    if moved := [chunk for chunk in chunks if chunk.base is not None]:
        conn.execute(_REBASE, [{"of_attempt": c.attempt, "of_stream": c.stream, "start": c.base} for c in moved])
    # A heartbeat shows that the agent lives, not that the work goes on.
    heard = [c for c in chunks if any(line.event is None or line.event.phase != "HEARTBEAT" for line in c.lines)]
    if by_job := [{"key": chunk.job_id, "at": at} for chunk in heard if chunk.job_id is not None]:
        conn.execute(_HEAR, by_job)
    if by_attempt := [{"key": chunk.attempt, "at": at} for chunk in heard if chunk.job_id is None]:
        conn.execute(_HEAR_ATTEMPT, by_attempt)


def _insert(conn: Connection, chunks: Sequence[Chunk]) -> None:
    streams = [(chunk.attempt, chunk.stream, chunk.lines) for chunk in chunks]
    if _try_change(conn, partial(insert_many, conn, streams)) is not None:
        for chunk in chunks:
            for line in chunk.lines:
                _insert_or_fault(conn, chunk, line)


def _insert_or_fault(conn: Connection, chunk: Chunk, line: Line) -> None:
    refusal = _try_change(conn, partial(insert_many, conn, [(chunk.attempt, chunk.stream, [line])]))
    if refusal is not None:
        fault = f"could not be stored: {_describe(refusal)}"
        refused = Line(offset=line.offset, length=line.length, fault=fault, text=_text_of(line))
        insert_many(conn, [(chunk.attempt, chunk.stream, [refused])])


def _project(conn: Connection, chunks: Sequence[Chunk]) -> None:
    """Derive the records of the chunks, together; where one is refused, line by line."""
    pending = [
        (chunk, [line for line in chunk.lines if line.event is not None and line.event.phase in PHASES])
        for chunk in chunks
    ]
    pending = [(chunk, lines) for chunk, lines in pending if lines]
    streams = [StreamLines(c.attempt, c.stream, lines, c.job_id) for c, lines in pending]
    if streams and _try_change(conn, partial(project_many, conn, streams)) is not None:
        for chunk, lines in pending:
            for line in lines:
                _project_or_fault(conn, chunk, line)


def _project_or_fault(conn: Connection, chunk: Chunk, line: Line) -> None:
    one = partial(project, conn, chunk.attempt, chunk.stream, [line], job_id=chunk.job_id)
    refusal = _try_change(conn, one)
    if refusal is not None:
        e = t.events.c
        this = (e.attempt == chunk.attempt, e.stream == chunk.stream, e.offset == line.offset)
        fault = f"stored as an event only: {_describe(refusal)}"
        conn.execute(update(t.events).where(*this).values(fault=fault, text=_text_of(line)))


def _try_change(conn: Connection, change: Callable[[], None]) -> Exception | None:
    """Make a change, or nothing of it; the error that refused its values. Raises where the database is away."""
    try:
        with conn.begin_nested():
            change()
    except Exception as error:
        if is_unavailable(error):
            raise
        return error
    return None


def _describe(error: Exception) -> str:
    words = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {words}"[:_FAULT_CHARACTERS].replace("\x00", "\ufffd")


def _text_of(line: Line) -> str:
    """The beginning of a line that the database refused, as text that it accepts."""
    text = line.text
    if text is None:
        try:
            text = render(line.event) if line.event is not None else ""
        except (ValueError, RecursionError):
            text = ""
    return text[:_TEXT_CHARACTERS].replace("\x00", "\ufffd").encode("utf-8", errors="replace").decode()


def find_stream(db: Database, attempt: str, stream: str) -> StreamRow:
    """How far a stream has been read; from its start where it never was."""
    row = db.first(_FIND_STREAM, {"of_attempt": attempt, "of_stream": stream})
    if row is None:
        return StreamRow(attempt=attempt, stream=stream, offset=0, inside=False)
    return StreamRow(**{**row, "tail": read_tail(row["tail"])})


def read_tail(value: str | None) -> bytes | None:
    """The `tail` column of a stream."""
    return bytes.fromhex(value) if value is not None else None


ATTEMPTS_FROM = (
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
) -> list[Event]:
    """Events of a job in (attempt, offset) order, those behind `after` (attempt number, offset) where it is given."""
    number, offset = after if after is not None else (0, -1)
    rows: list[Event] = []
    query = _EVENTS if phase is None else _EVENTS.where(t.events.c.phase == phase)
    with db.read() as conn:
        # Attempt by attempt, each a walk along the key: a join would sort the whole job to give its first page.
        for attempt, which in conn.execute(ATTEMPTS_FROM, {"job": job_id, "number": number}).all():
            place = {"attempt": attempt, "stream": stream, "after": offset if which == number else -1}
            rows += [_event(row) for row in conn.execute(query, {**place, "most": limit - len(rows)}).mappings()]
            if len(rows) >= limit:
                break
    return rows


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


def scan_events(db: Database, job_id: str, *, after: tuple[int, int] | None = None, limit: int) -> list[ScannedEvent]:
    """Events of a job in (attempt, offset) order, behind `after`; the same ones as list_events gives."""
    number, offset = after if after is not None else (0, -1)
    scanned: list[ScannedEvent] = []
    query = _AS_VALUES if db.engine.dialect.name == "postgresql" else _AS_TEXT
    with db.read() as conn:
        for attempt, which in conn.execute(ATTEMPTS_FROM, {"job": job_id, "number": number}).all():
            place = {"attempt": attempt, "stream": EVENTS_FILE, "after": offset if which == number else -1}
            for row in conn.execute(query, {**place, "most": limit - len(scanned)}):
                at, phase, event, data, fault, text = row
                plain = json.loads(data) if isinstance(data, str) else data
                scanned.append(ScannedEvent((which, at), phase, event, plain or {}, fault, text))
            if len(scanned) >= limit:
                break
    return scanned


def find_event(db: Database, attempt: str, *, phase: str, event: str) -> Event | None:
    """The last such event of an attempt."""
    asked = {"attempt": attempt, "stream": EVENTS_FILE, "phase": phase, "event": event}
    row = db.first(_LAST_OF, asked)
    return _event(row) if row is not None else None


_OF = (t.events.c[name] == bindparam(name) for name in ("attempt", "stream", "phase", "event"))
_LAST_OF = select(t.events).where(*_OF).order_by(t.events.c.offset.desc()).limit(1)


def measure_recovery_s(db: Database, lost: str, later: str) -> float | None:
    """Seconds from the last event of an attempt to the first training step of a later one; None before that step."""
    c = t.events.c
    stamped = select(c.ts).where(c.stream == EVENTS_FILE, c.ts.is_not(None))
    with db.read() as conn:
        last = conn.execute(stamped.where(c.attempt == lost).order_by(c.offset.desc()).limit(1)).scalar_one_or_none()
        steps = stamped.where(c.attempt == later, c.phase == "STEP").order_by(c.offset).limit(1)
        first = conn.execute(steps).scalar_one_or_none()
    return None if last is None or first is None else max(0.0, (first - last).total_seconds())


def _last_data() -> Select[Any]:
    e, later = t.events, t.events.alias("later")
    stream: BindParameter[str] = bindparam("stream")
    # A maximum per attempt is one step down the index; GROUP BY would walk every event of the phase.
    newest = (
        select(func.max(later.c.offset))
        .where(later.c.attempt == t.attempts.c.id, later.c.stream == stream, later.c.phase == bindparam("phase"))
        .scalar_subquery()
    )
    return (
        select(t.attempts.c.job_id, e.c.data)
        .select_from(t.attempts)
        .join(e, (e.c.attempt == t.attempts.c.id) & (e.c.stream == stream) & (e.c.offset == newest))
        .where(t.attempts.c.job_id.in_(bindparam("jobs", expanding=True)))
        .order_by(t.attempts.c.number)
    )


_LAST_DATA = _last_data()


def last_data(db: Database, job_ids: Sequence[str], *, phase: str) -> dict[str, Mapping[str, Any]]:
    """The data of the newest event of a phase, by job: one query, however long the streams are."""
    if not job_ids:
        return {}
    rows = db.rows(_LAST_DATA, {"jobs": job_ids, "stream": EVENTS_FILE, "phase": phase})
    return {job_id: data or {} for job_id, data in rows}  # a later attempt replaces an earlier one


def _event(row: RowMapping | dict[str, Any]) -> Event:
    empty: Mapping[str, Any] = {}
    return Event(**{**row, "data": row["data"] or empty, "extra": row["extra"] or empty})


_COLUMNS = (
    "attempt", "stream", "offset", "length", "ts", "seq", "phase", "event", "iteration", "epoch", "data", "extra",
    "fault", "text",
)  # fmt: skip


_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


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
