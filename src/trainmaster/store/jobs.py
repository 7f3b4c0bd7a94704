"""Jobs: insert, find, list, and every move between stages.

`advance` and `finish` are the only functions that change a job's stage. Both compare and set: they change the row only
while it is still in the stage the caller saw, and write the transition in the same transaction. False means that
another worker moved the job first; the caller drops its copy and reads the row again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    Text,
    and_,
    bindparam,
    case,
    func,
    insert,
    or_,
    select,
    type_coerce,
    update,
)

from trainmaster.api.jobs import Transition
from trainmaster.core.errors import JobUnreadable, KeyTaken, SpecError
from trainmaster.core.schema import Parts, build, to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import CANCEL_REQUESTED, Reason, Stage, Status, may_move, status_in
from trainmaster.store import tables as t
from trainmaster.store.columns import Sound, word
from trainmaster.store.costs import count_gpus
from trainmaster.store.database import Database
from trainmaster.store.heads import may_resume
from trainmaster.store.rows import JobRow, read_each


def insert_job(conn: Connection, job_id: str, spec: JobSpec, *, at: datetime, word: str | None = None) -> None:
    """A new job, queued. `word` is what its target stands for; not stated: as the spec writes it."""
    stage, status, plain = Stage.QUEUED, status_in(Stage.QUEUED), to_plain(spec)
    conn.execute(
        insert(t.jobs).values(
            id=job_id,
            name=spec.name,
            project=spec.project,
            target=word or spec.target,
            status=status.value,
            stage=stage.value,
            message="",
            spec=plain,
            gpus=count_gpus(plain),
            attempts=0,
            cancel_requested=False,
            created_at=at,
            tries=0,
            stage_since=at,
        )
    )
    _remember(conn, job_id, at=at, seen=None, to=stage, status=status.value)


def insert_once(
    conn: Connection, job_id: str, spec: JobSpec, *, key: str | None, by: str | None, at: datetime, word: str
) -> tuple[str, bool]:
    """The id of the job that stands for this submission, and whether it was made now. KeyTaken on another spec."""
    name, content = (digest(key), digest(json.dumps(to_plain(spec), sort_keys=True))) if key else (None, None)
    if name is not None:
        hold(conn, spec.project, name)
        earlier = select(t.jobs.c.id, t.jobs.c.submit_hash).where(
            t.jobs.c.project == spec.project, t.jobs.c.submit_key == name
        )
        row = conn.execute(earlier).first()
        if row is not None:
            if row.submit_hash != content:
                raise KeyTaken(f"this idempotency key stands for job {row.id}, which has another spec; take a new key")
            return row.id, False
    insert_job(conn, job_id, spec, at=at, word=word)
    more = {"submit_key": name, "submit_hash": content, "submitted_by": by}
    conn.execute(update(t.jobs).where(t.jobs.c.id == job_id).values(more))
    return job_id, True


def find_writer(conn: Connection, first: str, *, besides: str) -> str | None:
    """The open job that writes the checkpoints of this one: itself, or one that goes on with them, or may do so."""
    hold(conn, "checkpoints", first)
    writes_them = or_(t.jobs.c.id == first, may_resume(first))
    query = select(t.jobs.c.id).where(t.jobs.c.stage.is_not(None), t.jobs.c.id != besides, writes_them)
    return conn.execute(query.limit(1)).scalar_one_or_none()


def list_later(db: Database, job_id: str, first: str) -> list[str]:
    """Jobs of a run after this one, the newest first."""
    at = select(t.jobs.c.created_at).where(t.jobs.c.id == job_id).scalar_subquery()
    stated = Sound(t.jobs.c.spec)["resume_from"].as_string() == first
    query = select(t.jobs.c.id).where(stated, t.jobs.c.created_at > at, t.jobs.c.id != job_id)
    return [str(row[0]) for row in db.rows(query.order_by(t.jobs.c.created_at.desc()))]


def has_checkpoint(db: Database, first: str, *, alone: bool = False) -> bool:
    """Whether this job, or (not `alone`) one that went on with its checkpoints, reported a checkpoint as saved."""
    of_run = t.jobs.c.id == first
    if not alone:
        of_run = or_(of_run, Sound(t.jobs.c.spec)["resume_from"].as_string() == first)
    e = t.events.c
    query = (
        select(e.attempt)
        .select_from(t.jobs)
        .join(t.attempts, t.attempts.c.job_id == t.jobs.c.id)
        .join(t.events, e.attempt == t.attempts.c.id)
        .where(of_run, e.phase == "CHECKPOINT", e.event == "saved")
    )
    return db.first(query.limit(1)) is not None


def advance(
    conn: Connection,
    job_id: str,
    *,
    seen: Stage,
    to: Stage,
    at: datetime,
    reason: Reason | None = None,
    message: str = "",
    rest_until: datetime | None = None,
) -> bool:
    """Move a job on from the stage we saw; False if another worker moved it first. It may be told to rest there."""
    assert may_move(seen, to), f"a job may not go from {seen} to {to}"
    plain = status_in(to)
    values: dict[str, Any] = {"stage": to.value, "status": plain.value, "reason": reason and reason.value}
    values |= {"message": message, "stage_since": at, "tries": 0, "rest_until": rest_until}
    if plain is Status.RUNNING:
        values["started_at"] = at
    return _move(conn, job_id, seen=seen, to=to, at=at, reason=reason, message=message, values=values)


def finish(
    conn: Connection,
    job_id: str,
    *,
    seen: Stage,
    status: Status,
    at: datetime,
    reason: Reason | None = None,
    message: str = "",
) -> bool:
    """End a job. Only from RELEASING, where everything was given back, or from QUEUED, where nothing was taken."""
    assert status.final, f"{status} does not end a job"
    assert seen in (Stage.QUEUED, Stage.RELEASING), f"a job may not end in {seen}: something may still be held for it"
    values: dict[str, Any] = {"stage": None, "status": status.value, "reason": reason and reason.value}
    values |= {"message": message, "ended_at": at}
    return _move(conn, job_id, seen=seen, to=None, at=at, reason=reason, message=message, values=values)


def request_cancel(conn: Connection, job_id: str, *, at: datetime) -> bool:
    """Note that somebody wants the job to stop; False if it is final or unknown. Asking again changes nothing."""
    row = conn.execute(
        select(t.jobs.c.stage, t.jobs.c.cancel_requested).where(t.jobs.c.id == job_id).with_for_update()
    ).first()
    if row is None or row.stage is None:
        return False
    if not row.cancel_requested:
        conn.execute(
            update(t.jobs)
            .where(t.jobs.c.id == job_id)
            .values(
                cancel_requested=True,
                cancel_at=at,
                status=Status.CANCELLING.value,
                message=CANCEL_REQUESTED,
                rest_until=None,  # whatever it was waiting for, it is to stop now
            )
        )
        stage, status = Stage(row.stage), Status.CANCELLING.value
        _remember(conn, job_id, at=at, seen=stage, to=stage, status=status, message=CANCEL_REQUESTED)
    return True


def set_message(conn: Connection, job_id: str, message: str) -> None:
    """What a user should know of a job that does not move. A final job keeps its last word."""
    conn.execute(_SET_MESSAGE, {"job": job_id, "text": message})


_SET_MESSAGE = (
    update(t.jobs)
    .where(t.jobs.c.id == bindparam("job"), t.jobs.c.stage.is_not(None), t.jobs.c.message != bindparam("text"))
    .values(message=bindparam("text"))
)


def set_backoff(conn: Connection, job_id: str, *, until: datetime | None, tries: int, message: str) -> None:
    """A step failed and is to be tried again then; or, with no time, it went well again. A restart remembers."""
    row = update(t.jobs).where(t.jobs.c.id == job_id, t.jobs.c.stage.is_not(None))
    conn.execute(row.values(rest_until=until, tries=tries, message=message))


def mark_stalled(conn: Connection, job_id: str, *, at: datetime) -> bool:
    """Nothing was heard of the job for too long; False if that is known already. The next event takes it back."""
    row = update(t.jobs).where(t.jobs.c.id == job_id, t.jobs.c.stage.is_not(None), t.jobs.c.stalled_at.is_(None))
    return conn.execute(row.values(stalled_at=at)).rowcount == 1


# Statements that are asked all day are put together once: to do so takes longer than to ask.
NAMES = tuple(item.name for item in fields(JobRow))  # a lease is its holder's own business, and no reader's
# The spec as text where the driver has it so: those of a thousand jobs are few, and each is parsed once.
COLUMNS = tuple(type_coerce(t.jobs.c[name], Text).label(name) if name == "spec" else t.jobs.c[name] for name in NAMES)
_SELECT = select(*COLUMNS)
_ONE = _SELECT.where(t.jobs.c.id == bindparam("job"))


def find_job(db: Database, job_id: str) -> JobRow | None:
    row = db.first(_ONE, {"job": job_id})
    return read_job(row) if row is not None else None


_NEWEST = (
    _SELECT.order_by(t.jobs.c.created_at.desc(), t.jobs.c.id.desc()).limit(bindparam("most")).offset(bindparam("skip"))
)


def list_jobs(
    db: Database, *, status: Status | None = None, project: str | None = None, word: str | None = None,
    by: str | None = None, name: str | None = None, limit: int = 50, offset: int = 0,
    after: tuple[datetime, str] | None = None,
) -> list[JobRow]:  # fmt: skip
    """A page of jobs that `filter_jobs` lets through, newest first.

    `after` is the (created_at, id) of the last job of the page before: unlike an offset it gives no job twice while
    others are inserted.
    """
    query = filter_jobs(_NEWEST, status=status, project=project, word=word, by=by, name=name)
    if after is not None:
        j = t.jobs.c
        query = query.where(or_(j.created_at < after[0], and_(j.created_at == after[0], j.id < after[1])))
    with db.read() as conn:
        while rows := conn.execute(query, {"most": limit, "skip": offset}).mappings().all():
            if found := read_each(read_job, rows):
                return found
            offset += limit  # an empty page would look like the last one
    return []


def search_jobs(db: Database, word: str, *, limit: int = 20) -> list[JobRow]:
    """Jobs whose id begins with the word, or whose name it is; newest first."""
    match = t.jobs.c.id.startswith(word, autoescape=True) | (t.jobs.c.name == word)
    query = _SELECT.where(match).order_by(t.jobs.c.created_at.desc(), t.jobs.c.id.desc()).limit(limit)
    return read_each(read_job, db.mappings(query))


def count_jobs(
    db: Database, *, status: Status | None = None, project: str | None = None, word: str | None = None,
    by: str | None = None, name: str | None = None,
) -> int:  # fmt: skip
    every = select(func.count()).select_from(t.jobs)
    query = filter_jobs(every, status=status, project=project, word=word, by=by, name=name)
    return int(db.scalar(query))


def _counts(*wanted: ColumnElement[bool]) -> Select[Any]:
    each = (select(func.count()).select_from(t.jobs).where(t.jobs.c.status == word.value, *wanted) for word in Status)
    return select(*(query.scalar_subquery() for query in each))


_COUNTS, _PROJECT_COUNTS = _counts(), _counts(t.jobs.c.project == bindparam("project"))


def count_by_status(db: Database, *, project: str | None = None) -> dict[Status, int]:
    """How many jobs each status has: one question, and for each status a walk along its index."""
    with db.read() as conn:
        query = _COUNTS if project is None else _PROJECT_COUNTS
        return dict(zip(Status, conn.execute(query, {"project": project}).one(), strict=True))


def list_transitions(db: Database, job_id: str) -> list[Transition]:
    """Every move of a job, in its order."""
    query = select(t.transitions).where(t.transitions.c.job_id == job_id).order_by(t.transitions.c.id)
    return [_transition(row) for row in db.mappings(query)]


def list_ids(db: Database) -> list[str]:
    """The ids of all jobs, oldest first."""
    return db.scalars(select(t.jobs.c.id).order_by(t.jobs.c.created_at))


def list_ended(db: Database, *, before: datetime, limit: int = 1000) -> list[str]:
    """Final jobs that ended before a time, oldest first."""
    j = t.jobs.c
    query = select(j.id).where(j.stage.is_(None), j.ended_at < before).order_by(j.ended_at).limit(limit)
    return db.scalars(query)


def find_resumed(db: Database, first: str) -> str | None:
    """A job that resumed from this one, or may have."""
    query = select(t.jobs.c.id).where(t.jobs.c.id != first, may_resume(first)).limit(1)
    later: str | None = db.scalar(query)
    return later


def delete_events(db: Database, job_id: str, *, limit: int = 5000) -> int:
    """Delete some events of a final job, so that no transaction is long; how many. 0: none are left."""
    e = t.events.c
    with db.write() as conn:
        ids = conn.execute(select(t.attempts.c.id).where(t.attempts.c.job_id == job_id)).scalars().all()
        for attempt in ids:
            query = select(e.stream, e.offset).where(e.attempt == attempt).order_by(e.stream, e.offset).limit(limit)
            rows = conn.execute(query).all()
            if rows:
                last = rows[-1]
                upto = or_(e.stream < last.stream, and_(e.stream == last.stream, e.offset <= last.offset))
                conn.execute(t.events.delete().where(e.attempt == attempt, upto))
                return len(rows)
    return 0


def delete_job(conn: Connection, job_id: str) -> None:
    """Delete every row of a final job whose events are deleted already. The audit trail keeps its entries."""
    of_job = select(t.attempts.c.id).where(t.attempts.c.job_id == job_id)
    of_iterations = select(t.iterations.c.id).where(t.iterations.c.job_id == job_id)
    news = select(t.outbox.c.id).where(t.outbox.c.job_id == job_id)
    for table in (t.steps, t.epochs, t.evals):
        conn.execute(table.delete().where(table.c.iteration_id.in_(of_iterations)))
    conn.execute(t.deliveries.delete().where(t.deliveries.c.outbox_id.in_(news)))
    conn.execute(t.devices.update().where(t.devices.c.attempt.in_(of_job)).values(attempt=None, since=None))
    for table in (t.check_results, t.instances, t.streams, t.events):
        conn.execute(table.delete().where(table.c.attempt.in_(of_job)))
    for table in (t.outbox, t.artifacts, t.iterations, t.transitions, t.attempts, t.job_after, t.ledger_tallies):
        conn.execute(table.delete().where(table.c.job_id == job_id))
    conn.execute(t.jobs.delete().where(t.jobs.c.id == job_id, t.jobs.c.stage.is_(None)))


def hold(conn: Connection, project: str, name: str) -> None:
    """Lock this key until the transaction ends. SQLite has one writer at a time anyway."""
    if conn.dialect.name == "postgresql":
        conn.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"{project}/{name}", 0))))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _move(
    conn: Connection,
    job_id: str,
    *,
    seen: Stage,
    to: Stage | None,
    at: datetime,
    reason: Reason | None,
    message: str,
    values: dict[str, Any],
) -> bool:
    names = {f"new_{name}": value for name, value in values.items()}
    moved = conn.execute(_change(tuple(values)), {"job": job_id, "seen": seen.value, **names}).first()
    if moved is None:
        return False
    _remember(conn, job_id, at=at, seen=seen, to=to, status=moved.status, reason=reason, message=message)
    return True


@functools.cache
def _change(names: tuple[str, ...]) -> Any:
    """Set these columns of a job that is still in the stage that was seen; gives its status back.

    A job that is to be cancelled stays `cancelling` until it is final, and `started_at` is when it first ran.
    """
    j = t.jobs.c
    values: dict[str, Any] = {name: bindparam(f"new_{name}", type_=j[name].type) for name in names}
    if "ended_at" not in names:
        values["status"] = case((j.cancel_requested, Status.CANCELLING.value), else_=values["status"])
    if "started_at" in names:
        values["started_at"] = func.coalesce(j.started_at, values["started_at"])
    change = update(t.jobs).where(j.id == bindparam("job"), j.stage == bindparam("seen"))
    return change.values(values).returning(j.status)


def _remember(
    conn: Connection,
    job_id: str,
    *,
    at: datetime,
    seen: Stage | None,
    to: Stage | None,
    status: str,
    reason: Reason | None = None,
    message: str = "",
) -> None:
    stages = {"stage_from": seen and seen.value, "stage_to": to and to.value}
    row = {"job_id": job_id, "at": at, "status": status, "reason": reason and reason.value, "message": message}
    conn.execute(_INSERT_TRANSITION, {**stages, **row})


_INSERT_TRANSITION = insert(t.transitions)


def filter_jobs(
    query: Select[Any], *, status: Status | None, project: str | None, word: str | None = None,
    by: str | None = None, name: str | None = None,
) -> Select[Any]:  # fmt: skip
    """A query over the jobs with this status, project, submitter (`by`) and name.

    An id begins with `word`, or the name of the job or of its submitter contains it.
    """
    j = t.jobs.c
    exact = ((j.status, status and status.value), (j.project, project), (j.submitted_by, by), (j.name, name))
    wanted = [column == value for column, value in exact if value is not None]
    if word is not None:
        in_name = or_(*(column.contains(word, autoescape=True) for column in (j.name, j.submitted_by)))
        wanted.append(j.id.startswith(word, autoescape=True) | in_name)
    return query.where(*wanted)


def read_job(row: Mapping[str, Any] | RowMapping) -> JobRow:
    """A job from the values of COLUMNS; JobUnreadable where it has what this version does not know."""
    known, spec = dict[str, Any](row), row["spec"]
    try:
        known["spec"] = _spec(spec if isinstance(spec, str) else json.dumps(spec))
        known["status"] = Status(known["status"])
        known["stage"], known["reason"] = word(Stage, known["stage"]), word(Reason, known["reason"])
    except (SpecError, ValueError, TypeError, RecursionError):
        raise JobUnreadable(known["id"], known["project"]) from None  # the cause repeats values of the spec
    return JobRow(**known)


_PARTS: Parts = {}


@functools.lru_cache(maxsize=1024)
def _spec(text: str) -> JobSpec:
    """Checking a spec takes longer than reading its row, and the same ones are asked for again and again."""
    return build(JobSpec, json.loads(text), parts=_PARTS)


def _transition(row: RowMapping) -> Transition:
    values: dict[str, Any] = {name: value for name, value in row.items() if name not in ("id", "job_id")}
    values["status"] = Status(row["status"])
    values["reason"] = word(Reason, row["reason"])
    values["stage_from"], values["stage_to"] = word(Stage, row["stage_from"]), word(Stage, row["stage_to"])
    return Transition(**values)
