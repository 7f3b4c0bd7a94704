"""What a thousand running jobs cost: one query that shows how each stands, and one transaction that keeps their lines.

A job is here while nothing is wanted of it but to be listened to. Everything else is a step of the reconciler, which
reads whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, bindparam, or_, select, update

from trainmaster.core.events import Line
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.states import Report, Stage
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.lines import insert_many
from trainmaster.store.projection import project
from trainmaster.store.writes import append_events


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRow:
    """A job that runs, its attempt, and how far its events are kept."""

    job_id: str
    attempt: str
    report: Report | None
    message: str
    heard_at: datetime | None
    offset: int
    inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New lines of one attempt, which begin where its stream is acknowledged."""

    job_id: str
    attempt: str
    lines: Sequence[Line]
    inside: bool


def list_running(db: Database, token: str) -> list[WatchRow]:
    """The jobs of this token that run, that nobody wants to stop, and whose last step went well."""
    j, a, s = t.jobs.c, t.attempts.c, t.streams.c
    query = (
        select(j.id, a.id, a.report, j.message, j.heard_at, s.offset, s.inside)
        .select_from(t.jobs)
        .join(t.attempts, (a.job_id == j.id) & (a.number == j.attempts))
        .outerjoin(t.streams, (s.attempt == a.id) & (s.stream == EVENTS_FILE))
        .where(
            j.stage.is_not(None),  # said first: SQLite then walks the open jobs alone
            j.stage == Stage.RUNNING.value,
            j.lease_token == token,
            j.cancel_requested.is_(False),
            j.stalled_at.is_(None),
            j.tries == 0,
            or_(j.rest_until.is_(None), j.rest_until <= datetime.now(UTC)),
            a.stop_reason.is_(None),
            a.ended_at.is_(None),
        )
    )
    with db.read() as conn:
        rows = conn.execute(query).all()
    return [
        WatchRow(
            job_id=job, attempt=attempt, report=Report(report) if report is not None else None, message=message,
            heard_at=heard, offset=offset or 0, inside=bool(inside),
        )
        for job, attempt, report, message, heard, offset, inside in rows
    ]  # fmt: skip


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
