"""Changes happen whole, once, and only to what the caller saw."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy.exc import IntegrityError

from trainmaster.core.events import split
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Stage, Status, TargetState, may_move
from trainmaster.store import attempts, events, jobs
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow

from .rows import AT, JOB, LINES

pytestmark = pytest.mark.both_databases

SPEC = JobSpec(name="trial", command=("true",))
LATER = AT + timedelta(minutes=1)


@pytest.fixture
def queued(db: Database) -> Database:
    with db.write() as conn:
        jobs.insert_job(conn, JOB, SPEC, at=AT)
    return db


def job(db: Database) -> JobRow:
    row = jobs.find_job(db, JOB)
    assert row is not None
    return row


def test_a_move_is_made_once_and_remembered_with_it(queued: Database) -> None:
    with queued.write() as conn:
        assert jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.CHECKING, at=LATER, message="go")
        assert not jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.RUNNING, at=LATER)
    assert (job(queued).stage, job(queued).status, job(queued).started_at) == (Stage.CHECKING, Status.RUNNING, LATER)
    moves = [(m.stage_from, m.stage_to, m.status, m.message) for m in jobs.list_transitions(queued, JOB)]
    assert moves == [
        (None, Stage.QUEUED, Status.PENDING, ""),
        (Stage.QUEUED, Stage.CHECKING, Status.RUNNING, "go"),
    ]


@pytest.mark.parametrize("seen", list(Stage))
def test_an_illegal_move_is_our_mistake(queued: Database, seen: Stage) -> None:
    for to in Stage:
        if not may_move(seen, to):
            with pytest.raises(AssertionError), queued.write() as conn:
                jobs.advance(conn, JOB, seen=seen, to=to, at=AT)
    assert job(queued).stage is Stage.QUEUED


@pytest.mark.parametrize("seen", [s for s in Stage if s not in (Stage.QUEUED, Stage.RELEASING)])
def test_a_job_does_not_end_while_something_may_be_held(queued: Database, seen: Stage) -> None:
    with pytest.raises(AssertionError), queued.write() as conn:
        jobs.finish(conn, JOB, seen=seen, status=Status.FAILED, at=AT)


def test_started_at_is_the_first_start(queued: Database) -> None:
    with queued.write() as conn:
        for seen, to in ((Stage.QUEUED, Stage.RUNNING), (Stage.RUNNING, Stage.RELEASING)):
            jobs.advance(conn, JOB, seen=seen, to=to, at=AT)
        jobs.advance(conn, JOB, seen=Stage.RELEASING, to=Stage.QUEUED, at=LATER, reason=Reason.NODE_LOST)
    assert (job(queued).status, job(queued).reason) == (Status.PENDING, Reason.NODE_LOST)
    with queued.write() as conn:
        jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.RUNNING, at=LATER)
    assert job(queued).started_at == AT


def test_a_cancelled_job_stays_cancelling_through_its_moves_until_it_ends(queued: Database) -> None:
    with queued.write() as conn:
        assert jobs.request_cancel(conn, JOB, at=AT)
        assert jobs.request_cancel(conn, JOB, at=LATER)
        assert jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.RELEASING, at=AT)
    assert job(queued).status is Status.CANCELLING
    assert [m.status for m in jobs.list_transitions(queued, JOB)] == [
        Status.PENDING,
        Status.CANCELLING,
        Status.CANCELLING,
    ]
    with queued.write() as conn:
        assert jobs.finish(conn, JOB, seen=Stage.RELEASING, status=Status.CANCELLED, at=LATER)
        assert not jobs.request_cancel(conn, JOB, at=LATER)
        assert not jobs.finish(conn, JOB, seen=Stage.RELEASING, status=Status.FAILED, at=LATER)
        jobs.set_message(conn, JOB, "too late")
    assert (job(queued).status, job(queued).stage, job(queued).message) == (Status.CANCELLED, None, "")


def test_an_attempt_number_is_taken_once(queued: Database) -> None:
    with queued.write() as conn:
        attempts.insert_attempt(conn, JOB, 1, handle=None, at=AT)
    with pytest.raises(IntegrityError), queued.write() as conn:
        attempts.insert_attempt(conn, JOB, 1, handle=None, at=AT)
    assert job(queued).attempts == 1


def test_the_first_evidence_of_an_end_stands(queued: Database) -> None:
    with queued.write() as conn:
        attempt = attempts.insert_attempt(conn, JOB, 1, handle={"folder": "/x"}, at=AT)
        attempts.record_poll(conn, attempt, TargetState.RUNNING, at=AT)
        for reason in (Reason.NODE_LOST, Reason.SCRIPT_FAILED):
            attempts.end_attempt(
                conn, attempt, report=TargetState.LOST, reason=reason, message="", exit_record=None, at=LATER
            )
        attempts.record_poll(conn, attempt, TargetState.RUNNING, at=LATER)
    (row,) = attempts.list_attempts(queued, JOB)
    assert (row.report, row.reason, row.started_at, row.ended_at) == (TargetState.LOST, Reason.NODE_LOST, AT, LATER)


def test_lines_and_their_offset_move_together_and_once(queued: Database) -> None:
    lines = split(LINES, offset=0, zone=UTC)
    with queued.write() as conn:
        attempt = attempts.insert_attempt(conn, JOB, 1, handle=None, at=AT)
        assert events.append_events(conn, attempt, "events.jsonl", seen_offset=0, lines=lines[:2])
        # Two readers that both saw offset 0: the second changes nothing, whatever it read.
        assert not events.append_events(conn, attempt, "events.jsonl", seen_offset=0, lines=lines)
        seen = lines[2].offset
        assert events.append_events(conn, attempt, "events.jsonl", seen_offset=seen, lines=lines[2:])
        assert not events.append_events(conn, attempt, "events.jsonl", seen_offset=seen, lines=lines[2:])
    assert [row.offset for row in events.list_events(queued, JOB)] == [line.offset for line in lines]
    assert events.find_stream(queued, attempt, "events.jsonl").offset == len(LINES)


def test_a_crash_between_lines_and_offset_leaves_neither(queued: Database) -> None:
    with queued.write() as conn:
        attempt = attempts.insert_attempt(conn, JOB, 1, handle=None, at=AT)
    with pytest.raises(RuntimeError), queued.write() as conn:
        events.append_events(conn, attempt, "s", seen_offset=0, lines=split(LINES, offset=0, zone=UTC))
        raise RuntimeError
    assert events.list_events(queued, JOB, stream="s") == []
    assert events.find_stream(queued, attempt, "s").offset == 0


def test_times_are_kept_as_utc_whatever_zone_they_came_in(queued: Database) -> None:
    here = datetime(2025, 3, 1, 17, 30, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    with queued.write() as conn:
        jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.RUNNING, at=here)
    started = job(queued).started_at
    assert started is not None
    assert started.isoformat() == "2025-03-01T12:00:00+00:00"
