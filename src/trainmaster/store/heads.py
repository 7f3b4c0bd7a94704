"""Jobs without their specs: what must be decided of a job is decided too where its stored spec cannot be read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime

from sqlalchemy import ColumnElement, bindparam, or_, select

from trainmaster.store import tables as t
from trainmaster.store.columns import Shapeless, Sound
from trainmaster.store.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHead:
    """A job as its columns say. It may be of another version: `status` and `stage` are words as they are stored."""

    id: str
    name: str
    project: str
    target: str
    status: str
    stage: str | None  # None when final
    reason: str | None
    message: str
    attempts: int
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    submitted_by: str | None

    @property
    def final(self) -> bool:
        return self.stage is None


_HEAD = select(*(t.jobs.c[item.name] for item in fields(JobHead))).where(t.jobs.c.id == bindparam("job"))


def find_head(db: Database, job_id: str) -> JobHead | None:
    """A job without its spec."""
    row = db.first(_HEAD, {"job": job_id})
    return JobHead(**row) if row is not None else None


def search_heads(db: Database, word: str, *, limit: int = 20) -> list[tuple[str, str]]:
    """Id and name of jobs whose id begins with the word, or whose name it is; newest first."""
    j = t.jobs.c
    match = j.id.startswith(word, autoescape=True) | (j.name == word)
    rows = db.rows(select(j.id, j.name).where(match).order_by(j.created_at.desc(), j.id.desc()).limit(limit))
    return [(row.id, row.name) for row in rows]


def may_resume(first: str) -> ColumnElement[bool]:
    """Whether a job goes on with the checkpoints of this one, or is open and nobody can say.

    A spec that is no mapping names no job: one of the same project may be meant, and its checkpoints must stay.
    """
    other = t.jobs.alias("first").c
    project = select(other.project).where(other.id == first).scalar_subquery()
    stated = Sound(t.jobs.c.spec)["resume_from"].as_string() == first
    return or_(stated, t.jobs.c.stage.is_not(None) & (t.jobs.c.project == project) & Shapeless(t.jobs.c.spec))
