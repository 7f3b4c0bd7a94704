"""What the events of a job take in the database, and the mark where its quota ended."""

from __future__ import annotations

from sqlalchemy import func, select

from trainmaster.core.events import Line
from trainmaster.store import tables as t
from trainmaster.store.database import Database

CUT = "the job is over its quota of events: nothing that it writes from here on is kept"
_ROW_BYTES = 300  # of a line beside its own bytes: key, time, words, index; an estimate, not measured


def weigh(line: Line) -> int:
    """Bytes that a line takes in the database, about."""
    return _ROW_BYTES + (line.length if line.event is not None else len(line.text or ""))


def count_kept(db: Database, attempt: str) -> int:
    """Bytes that the lines of all streams take of the job whose attempt this is."""
    s, a = t.streams.c, t.attempts.c
    job = select(a.job_id).where(a.id == attempt).scalar_subquery()
    query = select(func.coalesce(func.sum(s.kept), 0)).where(s.attempt.in_(select(a.id).where(a.job_id == job)))
    with db.read() as conn:
        return int(conn.execute(query).scalar_one())


def is_cut(db: Database, attempt: str, stream: str) -> bool:
    """Whether the mark of the quota is the last line of a stream."""
    e = t.events.c
    query = select(e.fault).where(e.attempt == attempt, e.stream == stream).order_by(e.offset.desc()).limit(1)
    with db.read() as conn:
        return conn.execute(query).scalar() == CUT
