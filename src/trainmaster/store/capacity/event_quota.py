"""What the events of a job take in the database, and the mark where its quota ended."""

from __future__ import annotations

from sqlalchemy import bindparam, func, select

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
    return int(db.scalar(_KEPT, {"attempt": attempt}))


_JOB = select(t.attempts.c.job_id).where(t.attempts.c.id == bindparam("attempt")).scalar_subquery()
_KEPT = select(func.coalesce(func.sum(t.streams.c.kept), 0)).where(
    t.streams.c.attempt.in_(select(t.attempts.c.id).where(t.attempts.c.job_id == _JOB))
)


def is_cut(db: Database, attempt: str, stream: str) -> bool:
    """Whether the mark of the quota is the last line of a stream."""
    e = t.events.c
    query = select(e.fault).where(e.attempt == attempt, e.stream == stream).order_by(e.offset.desc()).limit(1)
    return bool(db.scalar(query) == CUT)
