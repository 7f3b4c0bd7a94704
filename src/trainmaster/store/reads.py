"""Every query. Each opens its own short read and returns frozen rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, RowMapping, Select, Text, bindparam, func, select, type_coerce

from trainmaster.core.plan import EVENTS_FILE, ExitRecord
from trainmaster.core.schema import build
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Report, Stage, Status
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.store.rows import AttemptRow, EventRow, JobRow, StreamRow, TransitionRow

# Statements that are asked all day are put together once: to do so takes longer than to ask.
_JOB = tuple(item.name for item in fields(JobRow))  # a lease is its holder's own business, and no reader's
# The spec as text where the driver has it so: those of a thousand jobs are few, and each is parsed once.
_JOBS = select(*(type_coerce(t.jobs.c[name], Text).label(name) if name == "spec" else t.jobs.c[name] for name in _JOB))
_ONE_JOB = _JOBS.where(t.jobs.c.id == bindparam("job"))


def find_job(db: Database, job_id: str) -> JobRow | None:
    with db.read() as conn:
        row = conn.execute(_ONE_JOB, {"job": job_id}).mappings().first()
    return _job(row) if row is not None else None


_NEWEST_JOBS = (
    _JOBS.order_by(t.jobs.c.created_at.desc(), t.jobs.c.id.desc()).limit(bindparam("most")).offset(bindparam("skip"))
)


def list_jobs(
    db: Database,
    *,
    status: Status | None = None,
    project: str | None = None,
    word: str | None = None,
    limit: int = 50,
    offset: int = 0,
) -> list[JobRow]:
    """A page of jobs, newest first. A `word` is the beginning of an id, or a part of a name."""
    query = _filtered(_NEWEST_JOBS, status=status, project=project, word=word)
    with db.read() as conn:
        return [_job(row) for row in conn.execute(query, {"most": limit, "skip": offset}).mappings()]


def search_jobs(db: Database, word: str, *, limit: int = 20) -> list[JobRow]:
    """Jobs whose id begins with the word, or whose name it is; newest first."""
    match = t.jobs.c.id.startswith(word, autoescape=True) | (t.jobs.c.name == word)
    query = _JOBS.where(match).order_by(t.jobs.c.created_at.desc(), t.jobs.c.id.desc()).limit(limit)
    with db.read() as conn:
        return [_job(row) for row in conn.execute(query).mappings()]


def count_jobs(
    db: Database, *, status: Status | None = None, project: str | None = None, word: str | None = None
) -> int:
    query = _filtered(select(func.count()).select_from(t.jobs), status=status, project=project, word=word)
    with db.read() as conn:
        return int(conn.execute(query).scalar_one())


def _counts(*wanted: ColumnElement[bool]) -> Select[Any]:
    each = (select(func.count()).select_from(t.jobs).where(t.jobs.c.status == word.value, *wanted) for word in Status)
    return select(*(one.scalar_subquery() for one in each))


_COUNTS, _PROJECT_COUNTS = _counts(), _counts(t.jobs.c.project == bindparam("project"))


def count_by_status(db: Database, *, project: str | None = None) -> dict[Status, int]:
    """How many jobs each status has: one question, and for each status a walk along its index."""
    with db.read() as conn:
        query = _COUNTS if project is None else _PROJECT_COUNTS
        return dict(zip(Status, conn.execute(query, {"project": project}).one(), strict=True))


def list_open(db: Database) -> list[str]:
    """The ids of every job that is not final, oldest first. Ids only: a tick must stay cheap with many of them."""
    query = select(t.jobs.c.id).where(t.jobs.c.stage.is_not(None)).order_by(t.jobs.c.created_at)
    with db.read() as conn:
        return list(conn.execute(query).scalars())


_ATTEMPTS = select(t.attempts).where(t.attempts.c.job_id == bindparam("job")).order_by(t.attempts.c.number)


def list_attempts(db: Database, job_id: str) -> list[AttemptRow]:
    """The attempts of a job, in their order."""
    with db.read() as conn:
        return [_attempt(row) for row in conn.execute(_ATTEMPTS, {"job": job_id}).mappings()]


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
) -> list[EventRow]:
    """Events of a job in (attempt, offset) order, those behind `after` (attempt number, offset) where it is given."""
    number, offset = after if after is not None else (0, -1)
    found: list[EventRow] = []
    query = _EVENTS if phase is None else _EVENTS.where(t.events.c.phase == phase)
    with db.read() as conn:
        # Attempt by attempt, each a walk along the key: a join would sort the whole job to give its first page.
        for attempt, which in conn.execute(ATTEMPTS_FROM, {"job": job_id, "number": number}).all():
            place = {"attempt": attempt, "stream": stream, "after": offset if which == number else -1}
            found += [_event(row) for row in conn.execute(query, {**place, "most": limit - len(found)}).mappings()]
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


def _filtered(
    query: Select[Any], *, status: Status | None, project: str | None, word: str | None = None
) -> Select[Any]:
    wanted: list[ColumnElement[bool]] = []
    if status is not None:
        wanted.append(t.jobs.c.status == status.value)
    if project is not None:
        wanted.append(t.jobs.c.project == project)
    if word is not None:
        in_name = t.jobs.c.name.contains(word, autoescape=True)
        wanted.append(t.jobs.c.id.startswith(word, autoescape=True) | in_name)
    return query.where(*wanted)


def _job(row: RowMapping) -> JobRow:
    known = dict(row)
    spec = known["spec"]
    known["spec"] = _spec(spec if isinstance(spec, str) else json.dumps(spec))
    known["status"] = Status(known["status"])
    known["stage"], known["reason"] = _word(Stage, known["stage"]), _word(Reason, known["reason"])
    return JobRow(**known)


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
