"""Each stage has its time, a stop is carried through by force in the end, and a silent job is told of."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from trainmaster.control import reap
from trainmaster.control import submit as submitting
from trainmaster.control.context import Context
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.control.transitions import end_overdue
from trainmaster.core.errors import NoAccess, StorageUnreachable, TargetError, Unreachable, UsageError
from trainmaster.core.plan import ExitRecord
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.storage import open_store
from trainmaster.store import attempts, jobs, tables
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow
from trainmaster.targets import Handle, Poll, Submission

from .scripted import RUNNING, Scripted, at_once, take_over

HOUR = timedelta(hours=1)
RECORD = ExitRecord(attempt="x", ok=False, ended_at="2025-03-01T12:00:00+00:00")


class World:
    """A job, its target, a plane, and a clock that can be put forward."""

    def __init__(self, db: Database, home: Path, *polls: Poll, queue: Any = None, **limits: Any) -> None:
        self.db, self.target, self.late = db, Scripted(*polls), timedelta()
        mapping = {"name": "a", "target": "scripted", "command": ["true"], "limits": {"attempts": 2, **limits}}
        mapping["queue"] = queue or {}
        self.id = submitting.submit(db, parse_spec(mapping), load=self.target.load).id
        self.plane = Context(
            db=db, home=home, load=self.target.load, token=take_over(db), rest_s=at_once,
            storage=open_store(home / "storage"), now=lambda: datetime.now(UTC) + self.late,
        )  # fmt: skip

    @property
    def job(self) -> JobRow:
        row = jobs.find_job(self.db, self.id)
        assert row is not None
        return row

    def walk(self, stage: Stage | None, *, most: int = 40) -> JobRow:
        """Steps until the job stands in the stage."""

        async def walk() -> None:
            for _ in range(most):
                if self.job.stage is stage:
                    return
                await handle_stage(self.plane, self.job)
            raise AssertionError(f"still {self.job.stage} after {most} steps: {self.job.message}")

        asyncio.run(walk())
        return self.job

    def fail(self, error: Exception) -> bool:
        """The step of the present stage has just failed, not for the first time."""
        with self.db.write() as conn:
            jobs.set_backoff(conn, self.id, until=None, tries=9, message="")
        return asyncio.run(end_overdue(self.plane, self.job, error))

    def news(self) -> list[str]:
        with self.db.read() as conn:
            return list(conn.execute(select(tables.outbox.c.topic).order_by(tables.outbox.c.id)).scalars())


def test_a_job_that_waits_longer_than_it_may_is_taken_out_of_the_queue(db: Database, tmp_path: Path) -> None:
    waiting = Poll(state=TargetState.WAITING, note="not admitted")
    world = World(db, tmp_path, waiting, queue={"max_wait_s": 600})
    world.walk(Stage.CHECKING)
    asyncio.run(handle_stage(world.plane, world.job))
    assert (world.job.message, world.target.made("cancel")) == ("not admitted", 0)
    world.late = HOUR
    for _ in range(2):
        asyncio.run(handle_stage(world.plane, world.job))
    assert world.target.made("cancel") == 1
    (attempt,) = attempts.list_attempts(db, world.id)
    assert (attempt.stop_reason, attempt.message) == (
        Reason.TIMED_OUT,
        "it waited longer than queue.max_wait_s of 600 s",
    )


def test_time_in_the_queue_is_that_before_the_first_start(db: Database, tmp_path: Path) -> None:
    """A preempted job waits again: what it saved is not thrown away for that."""
    polls = (RUNNING, RUNNING, Poll(state=TargetState.WAITING, note="preempted by Slurm"))
    world = World(db, tmp_path, *polls, queue={"max_wait_s": 600}, stall_minutes=None)
    world.walk(Stage.RUNNING)
    world.late = HOUR
    for _ in range(3):
        asyncio.run(handle_stage(world.plane, world.job))
    assert world.job.message == "it ran, and waits again: preempted by Slurm"
    assert attempts.list_attempts(db, world.id)[0].stop_reason is None


@pytest.mark.parametrize(("stage", "limit"), [(Stage.PLACING, HOUR / 12), (Stage.STAGING, HOUR)])
def test_a_start_that_keeps_failing_ends_the_attempt_at_its_deadline(
    db: Database, tmp_path: Path, stage: Stage, limit: timedelta
) -> None:
    world = World(db, tmp_path, attempts=1)
    world.walk(stage)
    world.late = limit - timedelta(seconds=30)
    assert not world.fail(Unreachable("no answer"))
    world.late = limit + timedelta(seconds=1)
    assert world.fail(StorageUnreachable("no bucket") if stage is Stage.STAGING else Unreachable("no answer"))
    job = world.walk(None)
    wanted = Reason.STORAGE_ERROR if stage is Stage.STAGING else Reason.TARGET_ERROR
    assert (job.status, job.reason, world.target.alive) == (Status.FAILED, wanted, set())
    assert world.target.made("release") == (stage is Stage.STAGING), "from staging on something may have been started"


def test_a_control_plane_that_was_away_for_long_tries_before_it_gives_up(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path)
    world.walk(Stage.STAGING)
    world.late = 100 * HOUR
    assert not asyncio.run(end_overdue(world.plane, world.job, Unreachable("no answer")))
    assert world.walk(Stage.RUNNING).attempts == 1


def test_checks_that_never_end_are_stopped_and_tried_again(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path, RUNNING, RUNNING, RUNNING)
    world.target.events = b'{"phase":"PREFLIGHT","event":"start"}\n'
    world.walk(Stage.CHECKING)
    asyncio.run(handle_stage(world.plane, world.job))
    assert attempts.list_attempts(db, world.id)[0].started_at is not None
    world.late = HOUR
    job = world.walk(Stage.QUEUED)
    (attempt,) = attempts.list_attempts(db, world.id)
    assert (attempt.reason, attempt.stop_reason) == (Reason.CHECK_INCOMPLETE, Reason.CHECK_INCOMPLETE)
    assert world.target.made("cancel") == 1 and job.attempts == 1


def test_what_waits_for_its_node_has_no_deadline(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path, Poll(state=TargetState.WAITING))
    world.walk(Stage.CHECKING)
    world.target.events = b""
    for _ in range(3):
        world.late += 100 * HOUR
        asyncio.run(handle_stage(world.plane, world.job))
    assert (world.job.stage, world.target.made("cancel")) == (Stage.CHECKING, 0)


def test_an_agent_that_forgets_its_timeout_is_held_to_it(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path, timeout_s=600.0, stall_minutes=None)
    world.walk(Stage.RUNNING)
    world.late = timedelta(seconds=650)
    asyncio.run(handle_stage(world.plane, world.job))
    assert world.target.made("cancel") == 0, "the agent has its own margin"
    world.late = timedelta(seconds=700)
    job = world.walk(None)
    assert (job.status, job.reason) == (Status.FAILED, Reason.TIMED_OUT)


@pytest.mark.parametrize("poll", [RUNNING, Poll(state=TargetState.UNKNOWN, note="no route")], ids=["deaf", "cut off"])
def test_a_job_that_does_not_stop_is_ended_by_force_at_the_deadline(db: Database, tmp_path: Path, poll: Poll) -> None:
    world = World(db, tmp_path, RUNNING, RUNNING, RUNNING, poll, grace_s=20.0)

    async def deaf(_attempt: str) -> None:
        raise Unreachable("no route")

    world.target.before["cancel"] = deaf
    world.walk(Stage.RUNNING)
    submitting.cancel(db, world.id)
    world.late = timedelta(seconds=79)
    with pytest.raises(Unreachable):
        asyncio.run(handle_stage(world.plane, world.job))
    world.late = timedelta(seconds=81)
    job = world.walk(None)
    assert (job.status, job.reason, world.target.alive) == (Status.CANCELLED, Reason.USER_CANCELLED, set())
    assert "by force" in job.message and world.news()[-1] == "job.cancelled"


def test_a_cancelled_job_does_not_wait_long_for_a_storage_that_is_gone(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path)
    world.walk(Stage.RUNNING)
    submitting.cancel(db, world.id)
    world.walk(Stage.COLLECTING)
    world.late = timedelta(seconds=590)
    assert not world.fail(StorageUnreachable("no bucket"))
    world.late = timedelta(seconds=610)
    assert world.fail(StorageUnreachable("no bucket"))
    job = world.walk(None)
    assert job.status is Status.CANCELLED and "could be kept: no bucket" in job.message


def test_a_release_that_fails_is_told_of_and_after_a_day_the_job_ends(db: Database, tmp_path: Path) -> None:
    """It was tried for ever; the row stays, and reap ends what is left once the target answers."""
    world = World(db, tmp_path, RUNNING, RUNNING, Poll(state=TargetState.LOST))
    world.walk(Stage.RELEASING)
    for hours, alarms in ((0.1, 0), (1, 1), (2, 1), (7, 2)):
        world.late = hours * HOUR
        assert not world.fail(Unreachable("the cloud is silent"))
        assert world.news().count("instance.leaked") == alarms
        assert world.job.stage is Stage.RELEASING
    world.late = 25 * HOUR
    assert world.fail(Unreachable("the cloud is silent"))
    assert (world.job.status, world.job.attempts) == (Status.FAILED, 1), "another attempt might run beside it"
    assert "may still run" in world.job.message and "`trainmaster reap --on scripted` ends it" in world.job.message
    (left,) = asyncio.run(reap.find(db, tmp_path, [], load=world.target.load))
    asyncio.run(reap.end(db, left, load=world.target.load))
    assert world.target.alive == set() and attempts.list_held(db) == []


@pytest.mark.parametrize("error", [TargetError("no right to delete"), UsageError("no kubeconfig")])
def test_a_target_that_refuses_to_release_ends_the_job_soon(db: Database, tmp_path: Path, error: Exception) -> None:
    world = World(db, tmp_path, RUNNING, RUNNING)
    world.walk(Stage.RUNNING)
    submitting.cancel(db, world.id)
    world.walk(Stage.RELEASING)
    assert not world.fail(error)
    world.late = timedelta(seconds=61)
    assert world.fail(error)
    assert world.job.status is Status.CANCELLED and str(error) in world.job.message


@pytest.mark.parametrize("error", [NoAccess("no credentials"), UsageError("no kubeconfig")])
def test_nothing_sent_is_nothing_to_release(db: Database, tmp_path: Path, error: Exception) -> None:
    """Without credentials a job stayed in releasing for ever, and every user could make any number of them."""
    world = World(db, tmp_path, attempts=1)

    async def refuse(_attempt: str) -> None:
        raise error

    for call in ("submit", "release", "read", "list"):
        world.target.before[call] = refuse
    job = world.walk(None)
    assert (job.status, job.reason, job.message) == (Status.FAILED, Reason.TARGET_ERROR, str(error))
    assert world.target.made("release") == 0 and attempts.list_held(db) == []


@pytest.mark.parametrize("answers", [True, False])
def test_a_job_that_is_refused_gives_its_place_back_at_once(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    """Its machine was free for the next one only half a minute later. One that does not answer holds nothing up."""

    async def place(_target: Scripted, submission: Submission) -> Handle:
        return {**submission.handle, "nodes": ["gpu-01"]}

    async def refuse(_attempt: str) -> None:
        raise UsageError("its inputs are not allowed")

    async def fail(_attempt: str) -> None:
        raise NoAccess("no key fits")

    monkeypatch.setattr(Scripted, "place", place, raising=False)
    world = World(db, tmp_path, attempts=1)
    world.target.before["submit"] = refuse
    if not answers:
        world.target.before["release"] = fail
    job = world.walk(None)
    assert (job.status, job.message) == (Status.FAILED, "its inputs are not allowed")
    assert world.target.made("release") == 1 and attempts.list_held(db) == []


def test_what_another_reconciler_may_have_sent_is_released(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path, attempts=1)

    async def refuse(_attempt: str) -> None:
        raise NoAccess("no credentials")

    world.walk(Stage.STAGING)
    world.plane.unsent.clear()  # as after a restart: the one before may have submitted
    world.target.before["submit"] = refuse
    assert world.walk(None).status is Status.FAILED
    assert world.target.made("release") == 1


@pytest.mark.parametrize(
    ("saves", "tried"),
    [((True,) * 4, 4), ((True, False, True, False), 4), ((True, False, False, True), 3), ((False, True), 1)],
)
def test_a_job_that_goes_on_saving_is_tried_again_whatever_it_says(
    db: Database, tmp_path: Path, saves: tuple[bool, ...], tried: int
) -> None:
    """By its text alone: a failed script was never tried again, however far it had come."""
    polls = [
        Poll(state=TargetState.FAILED, exit=replace(RECORD, reason=Reason.SCRIPT_FAILED, saved_since=saved))
        for saved in saves
    ]
    world = World(db, tmp_path, attempts=len(saves), grace_s=1.0)
    seen: list[str] = []

    async def next_end(attempt: str) -> None:
        if attempt not in seen:
            seen.append(attempt)
        world.target.polls = [polls[len(seen) - 1]]

    world.target.before["poll"] = next_end
    job = world.walk(None, most=200)
    assert (job.status, job.reason, job.attempts) == (Status.FAILED, Reason.SCRIPT_FAILED, tried)


def test_a_silent_job_is_told_of_once_and_heard_again(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path)
    world.walk(Stage.RUNNING)
    world.late = timedelta(minutes=29)
    asyncio.run(handle_stage(world.plane, world.job))
    assert world.job.stalled_at is None
    world.late = timedelta(minutes=31)
    for _ in range(3):
        asyncio.run(handle_stage(world.plane, world.job))
    assert world.job.stalled_at is not None and "nothing was heard" in world.job.message
    assert world.news().count("job.stalled") == 1 and world.target.made("cancel") == 0
    world.target.events += b'{"phase":"HEARTBEAT","event":"alive"}\n'
    asyncio.run(handle_stage(world.plane, world.job))
    assert world.job.stalled_at is not None, "an agent that lives does not say that the work goes on"
    world.target.events += b'{"phase":"STEP","event":"metrics"}\n'
    world.late = timedelta()
    for _ in range(2):
        asyncio.run(handle_stage(world.plane, world.job))
    assert (world.job.stalled_at, world.job.message) == (None, "")


def test_a_silent_job_is_stopped_where_its_spec_says_so(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path, on_stall="stop", stall_minutes=5.0, attempts=1)
    world.walk(Stage.RUNNING)
    world.late = timedelta(minutes=6)
    job = world.walk(None)
    assert (job.status, job.reason, world.target.made("cancel")) == (Status.FAILED, Reason.STALLED, 1)
    assert world.news() == ["job.started", "job.stalled", "job.failed"]


def test_the_first_reason_to_stop_counts_and_a_user_comes_before_it(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path)
    world.walk(Stage.RUNNING)
    attempt = attempts.list_attempts(db, world.id)[0].id
    now = datetime.now(UTC)
    with db.write() as conn:
        assert attempts.request_stop(conn, attempt, reason=Reason.OVER_BUDGET, message="the cap", at=now)
        assert not attempts.request_stop(conn, attempt, reason=Reason.STALLED, message="silent", at=now)
    submitting.cancel(db, world.id)
    job = world.walk(None)
    assert (job.status, job.reason) == (Status.CANCELLED, Reason.USER_CANCELLED)


def test_news_tells_each_turn_of_a_job_once(db: Database, tmp_path: Path) -> None:
    world = World(db, tmp_path, RUNNING, RUNNING, Poll(state=TargetState.LOST))
    world.walk(None, most=80)
    assert world.news() == ["job.started", "job.retried", "job.failed"]
    with db.read() as conn:
        payloads = list(conn.execute(select(tables.outbox.c.payload).order_by(tables.outbox.c.id)).scalars())
    assert [row["status"] for row in payloads] == ["running", "running", "failed"]
    assert payloads[-1]["reason"] == "node_lost" and payloads[-1]["job"] == world.id
