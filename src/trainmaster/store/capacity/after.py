"""Jobs that wait for other jobs: what each waits for, and how those ended.

A job names others when it is submitted, and those exist by then; what it names never changes. So no two wait for each
other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, Select, delete, insert, select, update

from trainmaster.core.states import Stage, Status
from trainmaster.store import tables as t
from trainmaster.store.database import Database

_A, _J = t.job_after.c, t.jobs.c
_BEFORE = t.jobs.alias("before_it")
_SHOWN = 3  # names in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A job that another one waits for."""

    id: str
    name: str
    status: Status | None  # None: it was deleted
    message: str = ""


def find_named(db: Database, project: str, word: str) -> list[Before]:
    """Jobs of a project that a word may stand for: the newest of this name, else those whose id begins so."""
    named = (_J.project == project) & (_J.name == word)
    begins = (_J.project == project) & _J.id.startswith(word, autoescape=True)
    rows = db.rows(_newest(named).limit(1)) or db.rows(_newest(begins).limit(2))
    return [Before(id=row.id, name=row.name, status=Status(row.status)) for row in rows]


def _newest(wanted: ColumnElement[bool]) -> Select[tuple[str, str, str]]:
    return select(_J.id, _J.name, _J.status).where(wanted).order_by(_J.created_at.desc(), _J.id.desc())


def insert_after(conn: Connection, job_id: str, before: Sequence[str]) -> None:
    """A new job waits for these, by id; its message says so."""
    names = {row.id: row.name for row in conn.execute(select(_J.id, _J.name).where(_J.id.in_(before)))}
    # One that was deleted since it was looked up is as one that was deleted later.
    rows = [{"job_id": job_id, "before": each, "name": names.get(each, each)} for each in dict.fromkeys(before)]
    if rows:
        conn.execute(insert(t.job_after), rows)
        conn.execute(update(t.jobs).where(_J.id == job_id).values(message=explain([row["name"] for row in rows])))


def explain(names: Sequence[str]) -> str:
    """Why a job waits, for people."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"waits for {', '.join(names[:_SHOWN])}{more} to end"


def held() -> ColumnElement[bool]:
    """Whether a row of `jobs` waits for a job that is not over."""
    is_open = select(_A.job_id).join(_BEFORE, _BEFORE.c.id == _A.before).where(_BEFORE.c.stage.is_not(None))
    return _J.id.in_(is_open)


def named() -> ColumnElement[bool]:
    """Whether a row of `jobs` was not released yet: it waits for others, or nobody has looked how they ended."""
    return _J.id.in_(select(_A.job_id))


def list_before(db: Database, job_id: str) -> list[Before]:
    """The jobs that one waits for; none where it may start."""
    columns = (_A.before, _A.name, _BEFORE.c.status, _BEFORE.c.message)
    query = select(*columns).select_from(t.job_after.outerjoin(_BEFORE, _BEFORE.c.id == _A.before))
    rows = db.rows(query.where(_A.job_id == job_id).order_by(_A.name, _A.before))
    return [
        Before(id=before, name=name, status=Status(status) if status else None, message=message or "")
        for before, name, status, message in rows
    ]


def list_reasons(db: Database, jobs: Collection[str]) -> dict[str, str]:
    """Why each of these jobs waits, where it waits for others."""
    query = select(_A.job_id, _A.name).join(_BEFORE, _BEFORE.c.id == _A.before).where(_BEFORE.c.stage.is_not(None))
    names: dict[str, list[str]] = {}
    if not jobs:
        return {}
    for job, name in db.rows(query.where(_A.job_id.in_(list(jobs))).order_by(_A.name)):
        names.setdefault(job, []).append(name)
    return {job: explain(some) for job, some in names.items()}


def release(conn: Connection, job_id: str, *, at: datetime) -> None:
    """All that it waited for is over: from now on it waits for machines, and its time in the queue begins."""
    conn.execute(delete(t.job_after).where(_A.job_id == job_id))
    queued = (_J.id == job_id) & (_J.stage == Stage.QUEUED.value)
    conn.execute(update(t.jobs).where(queued).values(stage_since=at, message=""))
