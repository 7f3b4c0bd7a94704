"""Every query. Each opens its own short read and returns frozen rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, func, select

from trainmaster.core.plan import EVENTS_FILE, ExitRecord
from trainmaster.core.schema import build
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Report, Stage, Status
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.rows import AttemptRow, EventRow, JobRow, StreamRow, TransitionRow


def find_job(db: Database, job_id: str) -> JobRow | None:
    with db.read() as conn:
        row = conn.execute(select(t.jobs).where(t.jobs.c.id == job_id)).mappings().first()
    return _job(row) if row is not None else None


def list_jobs(
    db: Database, *, status: Status | None = None, project: str | None = None, limit: int = 50, offset: int = 0
) -> list[JobRow]:
    """A page of jobs, newest first."""
    query = _filtered(select(t.jobs), status=status, project=project)
    query = query.order_by(t.jobs.c.created_at.desc(), t.jobs.c.id.desc()).limit(limit).offset(offset)
    with db.read() as conn:
        return [_job(row) for row in conn.execute(query).mappings()]


def search_jobs(db: Database, word: str, *, limit: int = 20) -> list[JobRow]:
    """Jobs whose id begins with the word, or whose name it is; newest first."""
    match = t.jobs.c.id.startswith(word, autoescape=True) | (t.jobs.c.name == word)
    query = select(t.jobs).where(match).order_by(t.jobs.c.created_at.desc(), t.jobs.c.id.desc()).limit(limit)
    with db.read() as conn:
        return [_job(row) for row in conn.execute(query).mappings()]


def count_jobs(db: Database, *, status: Status | None = None, project: str | None = None) -> int:
    query = _filtered(select(func.count()).select_from(t.jobs), status=status, project=project)
    with db.read() as conn:
        return int(conn.execute(query).scalar_one())


def count_by_status(db: Database, *, project: str | None = None) -> dict[Status, int]:
    """How many jobs each status has: one question, and for each status a walk along its index."""
    counts = [
        _filtered(select(func.count()).select_from(t.jobs), status=word, project=project).scalar_subquery()
        for word in Status
    ]
    with db.read() as conn:
        return dict(zip(Status, conn.execute(select(*counts)).one(), strict=True))


def list_open(db: Database) -> list[str]:
    """The ids of every job that is not final, oldest first. Ids only: a tick must stay cheap with many of them."""
    query = select(t.jobs.c.id).where(t.jobs.c.stage.is_not(None)).order_by(t.jobs.c.created_at)
    with db.read() as conn:
        return list(conn.execute(query).scalars())


def list_attempts(db: Database, job_id: str) -> list[AttemptRow]:
    """The attempts of a job, in their order."""
    query = select(t.attempts).where(t.attempts.c.job_id == job_id).order_by(t.attempts.c.number)
    with db.read() as conn:
        return [_attempt(row) for row in conn.execute(query).mappings()]


def list_transitions(db: Database, job_id: str) -> list[TransitionRow]:
    """Every move of a job, in its order."""
    query = select(t.transitions).where(t.transitions.c.job_id == job_id).order_by(t.transitions.c.id)
    with db.read() as conn:
        return [_transition(row) for row in conn.execute(query).mappings()]


def find_stream(db: Database, attempt: str, stream: str) -> StreamRow:
    """How far a stream has been read; from its start where it never was."""
    query = select(t.streams).where(t.streams.c.attempt == attempt, t.streams.c.stream == stream)
    with db.read() as conn:
        row = conn.execute(query).mappings().first()
    return StreamRow(**row) if row is not None else StreamRow(attempt=attempt, stream=stream, offset=0, inside=False)


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
    with db.read() as conn:
        ids = select(t.attempts.c.id, t.attempts.c.number).where(t.attempts.c.job_id == job_id)
        # Attempt by attempt, each a walk along the key: a join would sort the whole job to give its first page.
        for attempt in conn.execute(ids.where(t.attempts.c.number >= number).order_by(t.attempts.c.number)).all():
            query = select(t.events).where(t.events.c.attempt == attempt.id, t.events.c.stream == stream)
            if attempt.number == number:
                query = query.where(t.events.c.offset > offset)
            if phase is not None:
                query = query.where(t.events.c.phase == phase)
            query = query.order_by(t.events.c.offset).limit(limit - len(found))
            found += [_event(row) for row in conn.execute(query).mappings()]
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


def last_event(db: Database, job_ids: Sequence[str], *, phase: str, stream: str = EVENTS_FILE) -> dict[str, EventRow]:
    """The newest event of a phase for each of these jobs that has one: one query, however long the streams are."""
    e, later = t.events, t.events.alias("later")
    # A maximum per attempt is one step down the index; GROUP BY would walk every event of the phase.
    newest = (
        select(func.max(later.c.offset))
        .where(later.c.attempt == t.attempts.c.id, later.c.stream == stream, later.c.phase == phase)
        .scalar_subquery()
    )
    query = (
        select(t.attempts.c.job_id, e)
        .select_from(t.attempts)
        .join(e, (e.c.attempt == t.attempts.c.id) & (e.c.stream == stream) & (e.c.offset == newest))
        .where(t.attempts.c.job_id.in_(job_ids))
        .order_by(t.attempts.c.number)
    )
    with db.read() as conn:
        rows = [dict(row) for row in conn.execute(query).mappings()]
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


def _filtered(query: Select[Any], *, status: Status | None, project: str | None) -> Select[Any]:
    wanted: list[ColumnElement[bool]] = []
    if status is not None:
        wanted.append(t.jobs.c.status == status.value)
    if project is not None:
        wanted.append(t.jobs.c.project == project)
    return query.where(*wanted)


_JOB = tuple(item.name for item in fields(JobRow))  # a lease is its holder's own business, and no reader's


def _job(row: RowMapping) -> JobRow:
    words = {
        "status": Status(row["status"]),
        "stage": _word(Stage, row["stage"]),
        "reason": _word(Reason, row["reason"]),
    }
    known = {name: row[name] for name in _JOB}
    return JobRow(**{**known, **words, "spec": _spec(json.dumps(row["spec"]))})


@functools.lru_cache(maxsize=1024)
def _spec(text: str) -> JobSpec:
    """Checking a spec takes longer than reading its row, and the same ones are asked for again and again."""
    return build(JobSpec, json.loads(text))


def _attempt(row: RowMapping) -> AttemptRow:
    words = {"report": _word(Report, row["report"]), "reason": _word(Reason, row["reason"])}
    words["stop_reason"] = _word(Reason, row["stop_reason"])
    exit_record = build(ExitRecord, row["exit"]) if row["exit"] is not None else None
    return AttemptRow(**{**row, **words, "exit": exit_record})


def _event(row: RowMapping | dict[str, Any]) -> EventRow:
    empty: Mapping[str, Any] = {}
    return EventRow(**{**row, "data": row["data"] or empty, "extra": row["extra"] or empty})


def _transition(row: RowMapping) -> TransitionRow:
    values: dict[str, Any] = {name: value for name, value in row.items() if name != "id"}
    values["status"] = Status(row["status"])
    values["reason"] = _word(Reason, row["reason"])
    values["stage_from"], values["stage_to"] = _word(Stage, row["stage_from"]), _word(Stage, row["stage_to"])
    return TransitionRow(**values)


def _word(kind: Any, value: str | None) -> Any:
    return kind(value) if value is not None else None
