"""Attempts of a job: intent, target state, stop request, end, release; and what attempts of final jobs still hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, case, func, insert, literal, select, true, update

from trainmaster.core.plan import ExitRecord
from trainmaster.core.schema import build, to_plain
from trainmaster.core.states import Reason, Stage, TargetState
from trainmaster.store import jobs
from trainmaster.store import tables as t
from trainmaster.store.capacity import devices
from trainmaster.store.columns import UtcTime, word
from trainmaster.store.database import Database
from trainmaster.store.rows import AttemptRow, JobRow


def insert_attempt(conn: Connection, job_id: str, number: int, *, handle: Any, at: datetime) -> str:
    """The intent of a new attempt, committed before anything is started; returns its id.

    Two reconcilers that both take the same number meet at the key: one of the transactions is refused whole.
    """
    attempt = f"{job_id}.{number}"
    row = {"id": attempt, "job_id": job_id, "number": number, "handle": to_plain(handle), "message": ""}
    conn.execute(_INSERT, {**row, "created_at": at})
    conn.execute(_COUNT, {"job": job_id, "number": number})
    return attempt


_INSERT = insert(t.attempts)
_COUNT = update(t.jobs).where(t.jobs.c.id == bindparam("job")).values(attempts=bindparam("number"))
_THIS = update(t.attempts).where(t.attempts.c.id == bindparam("attempt"))
_SET_HANDLE = _THIS.values(handle=bindparam("new"))
_START = _THIS.values(started_at=func.coalesce(t.attempts.c.started_at, bindparam("at", type_=UtcTime())))
_REPORT = _THIS.where(t.attempts.c.ended_at.is_(None)).values(report=bindparam("new"))
_REPORT_RUNNING = _REPORT.values(started_at=func.coalesce(t.attempts.c.started_at, bindparam("at", type_=UtcTime())))


def set_handle(conn: Connection, attempt: str, handle: Any) -> None:
    """What the target gave to find the attempt again."""
    conn.execute(_SET_HANDLE, {"attempt": attempt, "new": to_plain(handle)})


def record_poll(conn: Connection, attempt: str, report: TargetState, *, at: datetime) -> None:
    """The last thing the target said of an attempt that is not over."""
    assert not report.over and report is not TargetState.UNKNOWN, f"{report} is not to be recorded here"
    change = _REPORT_RUNNING if report is TargetState.RUNNING else _REPORT
    conn.execute(change, {"attempt": attempt, "new": report.value, "at": at})


def mark_started(conn: Connection, attempt: str, *, at: datetime) -> None:
    """The workload of the attempt has begun, now or before."""
    conn.execute(_START, {"attempt": attempt, "at": at})


def request_stop(conn: Connection, attempt: str, *, reason: Reason, message: str, at: datetime) -> bool:
    """Request that an attempt saves and stops; False if it was released or asked before. The first reason counts.

    Of one that has ended the copy of what it left stops; its message stays what ended it.
    """
    a = t.attempts.c
    row = update(t.attempts).where(a.id == attempt, a.released_at.is_(None), a.stop_reason.is_(None))
    text = case((a.ended_at.is_(None), message), else_=a.message)
    return conn.execute(row.values(stop_reason=reason.value, stop_at=at, message=text)).rowcount == 1


def preempt(conn: Connection, job_id: str, *, message: str, at: datetime) -> bool:
    """Request that the running attempt of a job saves and stops for another job; False if it is to stop anyway."""
    running = (t.jobs.c.id == job_id) & (t.jobs.c.stage == Stage.RUNNING.value)
    number = conn.execute(select(t.jobs.c.attempts).where(running)).scalar_one_or_none()
    if number is None:
        return False
    return request_stop(conn, f"{job_id}.{number}", reason=Reason.PREEMPTED, message=message, at=at)


def end_attempt(
    conn: Connection,
    attempt: str,
    *,
    report: TargetState | None,
    reason: Reason | None,
    message: str,
    exit_record: ExitRecord | None,
    at: datetime,
) -> None:
    """How an attempt ended, once: the first evidence stands."""
    conn.execute(
        update(t.attempts)
        .where(t.attempts.c.id == attempt, t.attempts.c.ended_at.is_(None))
        .values(
            report=report and report.value,
            reason=reason and reason.value,
            message=message,
            exit=to_plain(exit_record),
            ended_at=at,
        )
    )


def mark_released(conn: Connection, attempt: str, *, at: datetime) -> None:
    """Everything the attempt held was given back; the first time counts, because until then it cost."""
    first = func.coalesce(t.attempts.c.released_at, literal(at, UtcTime()))
    conn.execute(update(t.attempts).where(t.attempts.c.id == attempt).values(released_at=first))
    devices.give_back(conn, attempt)


def note_attempt(conn: Connection, attempt: str, message: str) -> None:
    """A last word on an attempt that is over, where something of it could not be done."""
    conn.execute(update(t.attempts).where(t.attempts.c.id == attempt).values(message=message))


_ATTEMPTS = select(t.attempts).where(t.attempts.c.job_id == bindparam("job")).order_by(t.attempts.c.number)


def list_attempts(db: Database, job_id: str) -> list[AttemptRow]:
    """The attempts of a job, in their order."""
    return [_attempt(row) for row in db.mappings(_ATTEMPTS, {"job": job_id})]


def find_last(db: Database, job_ids: Sequence[str]) -> dict[str, tuple[JobRow | None, AttemptRow | None]]:
    """Jobs, each with its last attempt where it has one; without those that are gone."""
    with db.read() as conn:
        rows = [jobs.read_job(row) for row in conn.execute(_JOBS, {"jobs": job_ids}).mappings()]
        ids = [f"{job.id}.{job.attempts}" for job in rows if job.attempts]
        tried = [_attempt(row) for row in conn.execute(_THESE, {"ids": ids}).mappings()] if ids else []
    last = {attempt.job_id: attempt for attempt in tried}
    return {job.id: (job, last.get(job.id)) for job in rows}


_JOBS = select(*jobs.COLUMNS).where(t.jobs.c.id.in_(bindparam("jobs", expanding=True)))
_THESE = select(t.attempts).where(t.attempts.c.id.in_(bindparam("ids", expanding=True)))


def list_machines(db: Database, job_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """By job: the machines of its newest attempt, where its target names them."""
    a, j = t.attempts.c, t.jobs.c
    query = select(j.id, a.handle).join(t.attempts, (a.job_id == j.id) & (a.number == j.attempts))
    rows = db.rows(query.where(j.id.in_(job_ids)))
    named = {job: handle.get("nodes") for job, handle in rows if isinstance(handle, Mapping)}
    return {job: tuple(map(str, nodes)) for job, nodes in named.items() if isinstance(nodes, list)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldResource:
    """An attempt of a job that is over, and what it still holds."""

    attempt: str
    target: str
    handle: Mapping[str, Any]
    status: str  # of its job
    what: str


def list_held(db: Database, *, job: str | None = None) -> list[HeldResource]:
    """Attempts that were placed and never released, and instances not confirmed as gone; of one job, or of all."""
    a, j, i = t.attempts.c, t.jobs.c, t.instances.c
    over, placed = j.stage.is_(None) & (j.id == job if job is not None else true()), a.handle.is_not(None)
    both = t.attempts.join(t.jobs, j.id == a.job_id)
    columns = (a.id, j.target, a.handle, j.status)
    unreleased = select(*columns).select_from(both).where(over, placed, a.released_at.is_(None)).order_by(a.id)
    machines = (
        select(*columns, i.provider_id, i.nonce)
        .select_from(both.join(t.instances, i.attempt == a.id))
        .where(over, placed, i.state.not_in(("gone",)))
        .order_by(a.id, i.id)
    )
    with db.read():
        found = [(row, "never given back") for row in db.rows(unreleased)]
        found += [(row, f"machine {row.provider_id or row.nonce}") for row in db.rows(machines)]
    return [HeldResource(attempt=row[0], target=row[1], handle=row[2], status=row[3], what=what) for row, what in found]


def _attempt(row: RowMapping) -> AttemptRow:
    words = {"report": word(TargetState, row["report"]), "reason": word(Reason, row["reason"])}
    words["stop_reason"] = word(Reason, row["stop_reason"])
    exit_record = build(ExitRecord, row["exit"]) if row["exit"] is not None else None
    return AttemptRow(**{**row, **words, "exit": exit_record})
