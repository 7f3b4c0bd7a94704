"""What the control plane finds out about an attempt that goes on: it has to stop, it is silent, it was given back."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, func, literal, update

from trainmaster.core.states import Reason
from trainmaster.store import tables as t


def request_stop(conn: Connection, attempt: str, *, reason: Reason, message: str, at: datetime) -> bool:
    """Want an attempt to save and stop; False if it is over or was told before. The first reason counts."""
    row = update(t.attempts).where(
        t.attempts.c.id == attempt, t.attempts.c.ended_at.is_(None), t.attempts.c.stop_reason.is_(None)
    )
    return conn.execute(row.values(stop_reason=reason.value, stop_at=at, message=message)).rowcount == 1


def mark_stalled(conn: Connection, job_id: str, *, at: datetime) -> bool:
    """Nothing was heard of the job for too long; False if that is known already. The next event takes it back."""
    row = update(t.jobs).where(t.jobs.c.id == job_id, t.jobs.c.stage.is_not(None), t.jobs.c.stalled_at.is_(None))
    return conn.execute(row.values(stalled_at=at)).rowcount == 1


def mark_started(conn: Connection, attempt: str, *, at: datetime) -> None:
    """The workload of the attempt has begun, now or before."""
    first = func.coalesce(t.attempts.c.started_at, literal(at, t.UtcTime()))
    conn.execute(update(t.attempts).where(t.attempts.c.id == attempt).values(started_at=first))


def mark_released(conn: Connection, attempt: str, *, at: datetime) -> None:
    """Everything the attempt held was given back; the first time counts, because until then it cost."""
    first = func.coalesce(t.attempts.c.released_at, literal(at, t.UtcTime()))
    conn.execute(update(t.attempts).where(t.attempts.c.id == attempt).values(released_at=first))


def note_attempt(conn: Connection, attempt: str, message: str) -> None:
    """A last word on an attempt that is over, where something of it could not be done."""
    conn.execute(update(t.attempts).where(t.attempts.c.id == attempt).values(message=message))
