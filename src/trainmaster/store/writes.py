"""Every change. Each takes the caller's write transaction, so that what belongs together is committed together.

`advance` and `finish` are the only doors between stages. Both compare and set: they change the row only while it is
still in the stage the caller saw, and write the history in the same transaction. False means that somebody else was
first; the caller drops what it knew and looks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, case, func, insert, literal, select, update
from sqlalchemy.dialects import postgresql, sqlite

from trainmaster.core.events import Line
from trainmaster.core.plan import ExitRecord
from trainmaster.core.schema import to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Report, Stage, Status, may_move, status_in
from trainmaster.store import tables as t
from trainmaster.store.lines import insert_lines
from trainmaster.store.projection import project


def insert_job(conn: Connection, job_id: str, spec: JobSpec, *, at: datetime) -> None:
    """A new job, queued."""
    stage, status = Stage.QUEUED, status_in(Stage.QUEUED)
    conn.execute(
        insert(t.jobs).values(
            id=job_id,
            name=spec.name,
            project=spec.project,
            target=spec.target,
            status=status.value,
            stage=stage.value,
            message="",
            spec=to_plain(spec),
            attempts=0,
            cancel_requested=False,
            created_at=at,
            tries=0,
            stage_since=at,
        )
    )
    _remember(conn, job_id, at=at, seen=None, to=stage, status=status.value)


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
    values: dict[str, Any] = {
        "stage": to.value,
        "status": case((t.jobs.c.cancel_requested, Status.CANCELLING.value), else_=plain.value),
        "reason": reason and reason.value,
        "message": message,
        "stage_since": at,
        "tries": 0,
        "rest_until": rest_until,
    }
    if plain is Status.RUNNING:
        values["started_at"] = func.coalesce(t.jobs.c.started_at, literal(at, t.UtcTime()))
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
    values = {
        "stage": None,
        "status": status.value,
        "reason": reason and reason.value,
        "message": message,
        "ended_at": at,
    }
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
                message="cancel requested",
                rest_until=None,  # whatever it was waiting for, it is to stop now
            )
        )
        stage = Stage(row.stage)
        status = Status.CANCELLING.value
        _remember(conn, job_id, at=at, seen=stage, to=stage, status=status, message="cancel requested")
    return True


def set_message(conn: Connection, job_id: str, message: str) -> None:
    """What a user should know of a job that does not move. A final job keeps its last word."""
    conn.execute(
        update(t.jobs)
        .where(t.jobs.c.id == job_id, t.jobs.c.stage.is_not(None), t.jobs.c.message != message)
        .values(message=message)
    )


def rest(conn: Connection, job_id: str, *, until: datetime | None, tries: int, message: str) -> None:
    """A step failed and is to be tried again then; or, with no time, it went well again. A restart remembers."""
    conn.execute(
        update(t.jobs)
        .where(t.jobs.c.id == job_id, t.jobs.c.stage.is_not(None))
        .values(rest_until=until, tries=tries, message=message)
    )


def insert_attempt(conn: Connection, job_id: str, number: int, *, handle: Any, at: datetime) -> str:
    """The intent of a new attempt, committed before anything is started; returns its id.

    Two reconcilers that both take the same number meet at the key: one of the transactions is refused whole.
    """
    attempt = f"{job_id}.{number}"
    conn.execute(
        insert(t.attempts).values(
            id=attempt, job_id=job_id, number=number, handle=to_plain(handle), message="", created_at=at
        )
    )
    conn.execute(update(t.jobs).where(t.jobs.c.id == job_id).values(attempts=number))
    return attempt


def set_handle(conn: Connection, attempt: str, handle: Any) -> None:
    """What the target gave to find the attempt again."""
    conn.execute(update(t.attempts).where(t.attempts.c.id == attempt).values(handle=to_plain(handle)))


def record_poll(conn: Connection, attempt: str, report: Report, *, at: datetime) -> None:
    """The last thing the target said of an attempt that is not over."""
    assert not report.over and report is not Report.UNKNOWN, f"{report} is not to be recorded here"
    values: dict[str, Any] = {"report": report.value}
    if report is Report.RUNNING:
        values["started_at"] = func.coalesce(t.attempts.c.started_at, literal(at, t.UtcTime()))
    conn.execute(update(t.attempts).where(t.attempts.c.id == attempt, t.attempts.c.ended_at.is_(None)).values(values))


def end_attempt(
    conn: Connection,
    attempt: str,
    *,
    report: Report | None,
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


def append_events(
    conn: Connection, attempt: str, stream: str, *, seen_offset: int, lines: Sequence[Line], inside: bool = False
) -> bool:
    """Keep lines that begin at the offset we saw, what they say of the training, and move the offset behind them.

    False, and nothing is changed, if another reader has already moved it.
    """
    if not lines:
        return True
    assert lines[0].offset == seen_offset, "the lines do not begin where the stream was acknowledged"
    end = lines[-1].offset + lines[-1].length
    at = datetime.now(UTC)
    if not _acknowledge(conn, attempt, stream, seen=seen_offset, end=end, inside=inside, at=at):
        return False
    # An agent that only says that it is alive does not say that the work goes on.
    if any(line.event is None or line.event.phase != "HEARTBEAT" for line in lines):
        job = t.jobs.c.id == select(t.attempts.c.job_id).where(t.attempts.c.id == attempt).scalar_subquery()
        conn.execute(update(t.jobs).where(job).values(heard_at=at, stalled_at=None))
    insert_lines(conn, attempt, stream, lines)
    project(conn, attempt, stream, lines)
    return True


def _acknowledge(
    conn: Connection, attempt: str, stream: str, *, seen: int, end: int, inside: bool, at: datetime
) -> bool:
    row = update(t.streams).where(t.streams.c.attempt == attempt, t.streams.c.stream == stream)
    moved = conn.execute(row.where(t.streams.c.offset == seen).values(offset=end, inside=inside, heard_at=at))
    if moved.rowcount == 1:
        return True
    if seen != 0:
        return False
    # A stream's first lines. Should another reader write the same row now, one of us finds it there and gives way.
    dialect = sqlite if conn.dialect.name == "sqlite" else postgresql
    first = dialect.insert(t.streams).values(attempt=attempt, stream=stream, offset=end, inside=inside, heard_at=at)
    return conn.execute(first.on_conflict_do_nothing().returning(t.streams.c.offset)).first() is not None


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
    moved = conn.execute(update(t.jobs).where(t.jobs.c.id == job_id, t.jobs.c.stage == seen.value).values(values))
    if moved.rowcount != 1:
        return False
    status = conn.execute(select(t.jobs.c.status).where(t.jobs.c.id == job_id)).scalar_one()
    _remember(conn, job_id, at=at, seen=seen, to=to, status=status, reason=reason, message=message)
    return True


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
    conn.execute(
        insert(t.transitions).values(
            job_id=job_id,
            at=at,
            stage_from=seen and seen.value,
            stage_to=to and to.value,
            status=status,
            reason=reason and reason.value,
            message=message,
        )
    )
