"""Rows that several test files of the store start from."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import func, select

from trainmaster.core.events import split
from trainmaster.core.plan import ExitRecord
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.store import attempts, events, jobs
from trainmaster.store import tables as t
from trainmaster.store.database import Database

JOB = "6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11"
AT = datetime(2025, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
LINES = (
    b'{"v":1,"ts":"2025-03-01T12:00:00Z","seq":1,"phase":"TRAINING","event":"start","data":{"steps":4}}\n'
    b"not json\n"
    b'{"phase":"STEP","event":"metrics","epoch":1,"data":{"loss":1.5},"who":"me"}\n'
)


def list_open(db: Database) -> list[str]:
    """Ids of jobs that are not final, oldest first."""
    query = select(t.jobs.c.id).where(t.jobs.c.stage.is_not(None)).order_by(t.jobs.c.created_at)
    with db.read() as conn:
        return list(conn.execute(query).scalars())


def count_faults(db: Database, job_id: str) -> int:
    """Lines of a job's streams with something wrong in them."""
    source = t.attempts.join(t.events, t.events.c.attempt == t.attempts.c.id)
    query = select(func.count()).select_from(source)
    with db.read() as conn:
        wanted = (t.attempts.c.job_id == job_id, t.events.c.fault.is_not(None))
        return conn.execute(query.where(*wanted)).scalar_one()


def a_job_with_everything(db: Database) -> str:
    """A failed job with one attempt, an exit record and three lines; returns the attempt's id."""
    spec = JobSpec(name="trial", command=("false",))
    with db.write() as conn:
        jobs.insert_job(conn, JOB, spec, at=AT)
        attempt = attempts.insert_attempt(conn, JOB, 1, handle={"folder": "/x"}, at=AT)
        assert jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.RUNNING, at=AT)
        lines = split(LINES, offset=0, zone=UTC)
        assert events.append_events(conn, attempt, "events.jsonl", seen_offset=0, lines=lines)
        attempts.end_attempt(
            conn,
            attempt,
            report=TargetState.FAILED,
            reason=Reason.SCRIPT_FAILED,
            message="exit code 1",
            exit_record=ExitRecord(
                attempt=attempt, ok=False, ended_at=AT.isoformat(), reason=Reason.SCRIPT_FAILED, exit_codes={"0": 1}
            ),
            at=AT,
        )
        assert jobs.advance(conn, JOB, seen=Stage.RUNNING, to=Stage.RELEASING, at=AT)
        assert jobs.finish(
            conn, JOB, seen=Stage.RELEASING, status=Status.FAILED, reason=Reason.SCRIPT_FAILED, message="no", at=AT
        )
    return attempt
