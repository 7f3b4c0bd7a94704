"""What the control plane does for a job in each stage: look, act, apply.

Each step is told what the rows say, asks or tells the target, and then writes in one short transaction that holds
only if the job is still where it was seen. No target call is made inside a transaction. A step may be cut off at any
point and taken again: the rows say what was meant before the target is told, and every target call may be repeated.

    queued      plan; commit the attempt with the handle it will have        (the intent)
    placing     nothing was started yet, for certain
    staging     submit, or find it submitted
    checking    watch: take events in; preflight goes on
    running     watch: take events in; the workload goes on
    collecting  the attempt is over: take in what it wrote
    releasing   give back what it held, take in the last half line; then end the job, or queue it for another attempt
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from trainmaster.control.ingest import ingest
from trainmaster.core.errors import TargetError, Unreachable, UsageError
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.results import Overall
from trainmaster.core.states import Reason, Report, Stage, Status
from trainmaster.store import Connection, Database, reads, writes
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import Handle, Placement, Poll, Submission, Target

T = TypeVar("T")

# Longest wait for one call of a target, in seconds; then we could not ask, and ask again later.
TIMEOUTS_S = {"submit": 300.0, "poll": 30.0, "read": 60.0, "cancel": 30.0, "release": 120.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """What every step needs: the rows, the folder, the targets, and how long to wait for them."""

    db: Database
    home: Path
    load: Callable[[str], Target]
    timeouts_s: Mapping[str, float]

    async def call(self, name: str, answer: Awaitable[T]) -> T:
        limit = self.timeouts_s[name]
        try:
            async with asyncio.timeout(limit):
                return await answer
        except TimeoutError as wrong:
            raise Unreachable(f"the target did not answer `{name}` within {limit:g} s") from wrong

    async def apply(self, change: Callable[[Connection], T]) -> T:
        def commit() -> T:
            with self.db.write() as conn:
                return change(conn)

        return await asyncio.to_thread(commit)

    def plan(self, job: JobRow, number: int) -> Submission:
        folder = self.home / "jobs" / job.id
        return self.load(job.target).plan(Placement(attempt=f"{job.id}.{number}", spec=job.spec, job_folder=folder))


async def step(plane: Plane, job: JobRow) -> bool:
    """One step for a job that is not final. True if it moved, and may have more to do at once."""
    assert job.stage is not None, "a final job has no next step"
    if job.stage is Stage.QUEUED:
        return await _queue(plane, job)
    attempt = (await asyncio.to_thread(reads.list_attempts, plane.db, job.id))[-1]
    assert attempt.handle is not None, "the handle is committed with the attempt"
    return await _STEPS[job.stage](plane, job, attempt, attempt.handle)


async def _queue(plane: Plane, job: JobRow) -> bool:
    if job.cancel_requested:
        return await plane.apply(lambda conn: _end(conn, job, Status.CANCELLED, Reason.USER_CANCELLED, ""))
    number = job.attempts + 1
    try:
        planned = plane.plan(job, number)
    except (TargetError, UsageError) as refused:
        # Planning asks nobody: what it refuses now it will refuse for ever.
        message = str(refused)
        return await plane.apply(lambda conn: _end(conn, job, Status.FAILED, Reason.TARGET_ERROR, message))

    def change(conn: Connection) -> bool:
        at = datetime.now(UTC)
        if not writes.advance(conn, job.id, seen=Stage.QUEUED, to=Stage.PLACING, at=at):
            return False
        writes.insert_attempt(conn, job.id, number, handle=planned.handle, at=at)
        return True

    return await plane.apply(change)


async def _place(plane: Plane, job: JobRow, attempt: AttemptRow, _handle: Handle) -> bool:
    if job.cancel_requested:
        return await _give_up(plane, job, attempt, Reason.USER_CANCELLED, "cancelled before it was started")
    # Committed before submit is called: from here on something may exist.
    return await plane.apply(lambda conn: _move(conn, job, Stage.STAGING))


async def _stage(plane: Plane, job: JobRow, attempt: AttemptRow, _handle: Handle) -> bool:
    if job.cancel_requested:
        # Submit may or may not have happened; release gives back whatever there is of this attempt.
        return await _give_up(plane, job, attempt, Reason.USER_CANCELLED, "cancelled while it was being started")
    try:
        handle = await plane.call("submit", plane.load(job.target).submit(plane.plan(job, attempt.number)))
    except Unreachable:
        raise
    except (TargetError, UsageError) as refused:
        return await _give_up(plane, job, attempt, Reason.TARGET_ERROR, str(refused))

    def change(conn: Connection) -> bool:
        writes.set_handle(conn, attempt.id, handle)
        return _move(conn, job, Stage.CHECKING)

    return await plane.apply(change)


async def _watch(plane: Plane, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    target = plane.load(job.target)
    poll = await plane.call("poll", target.poll(handle))
    if poll.report.over:
        reason, message = _judge(poll)
        return await plane.apply(lambda conn: _over(conn, job, attempt, poll=poll, reason=reason, message=message))
    if job.cancel_requested:
        await plane.call("cancel", target.cancel(handle, reason=Reason.USER_CANCELLED.value))
    if poll.report is Report.UNKNOWN:
        raise Unreachable(poll.note or "the target cannot be asked now")
    await _take_in(plane, job, attempt, handle)
    go = job.stage is Stage.CHECKING and await asyncio.to_thread(_checked, plane.db, job, attempt)
    note = "cancel requested" if job.cancel_requested else poll.note

    def change(conn: Connection) -> bool:
        writes.record_poll(conn, attempt.id, poll.report, at=datetime.now(UTC))
        writes.set_message(conn, job.id, note)
        return go and _move(conn, job, Stage.RUNNING)

    if not go and poll.report is attempt.report and note == job.message:
        return False  # nothing is new: most ticks of most jobs cost no write
    return await plane.apply(change)


async def _collect(plane: Plane, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    if not await _take_in(plane, job, attempt, handle):
        return False
    reason, message = attempt.reason, attempt.message
    return await plane.apply(lambda conn: _move(conn, job, Stage.RELEASING, reason=reason, message=message))


async def _release(plane: Plane, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    await plane.call("release", plane.load(job.target).release(handle))
    # Only now can nobody write any more: what a lost attempt's last processes wrote, and half a line, are taken here.
    if not await _take_in(plane, job, attempt, handle, last=True):
        return False
    reason, message = attempt.reason, attempt.message
    if attempt.report is Report.SUCCEEDED:
        return await plane.apply(lambda conn: _end(conn, job, Status.COMPLETED, None, ""))
    if job.cancel_requested or reason is Reason.USER_CANCELLED:
        return await plane.apply(lambda conn: _end(conn, job, Status.CANCELLED, Reason.USER_CANCELLED, message))
    assert reason is not None, "an attempt that did not succeed has a reason"
    if reason.rule.retry and job.attempts < job.spec.limits.attempts:
        again = f"attempt {attempt.number} ended: {message}"
        return await plane.apply(lambda conn: _move(conn, job, Stage.QUEUED, reason=reason, message=again))
    return await plane.apply(lambda conn: _end(conn, job, Status.FAILED, reason, message))


_STEPS: Mapping[Stage, Callable[[Plane, JobRow, AttemptRow, Handle], Awaitable[bool]]] = {
    Stage.PLACING: _place,
    Stage.STAGING: _stage,
    Stage.CHECKING: _watch,
    Stage.RUNNING: _watch,
    Stage.COLLECTING: _collect,
    Stage.RELEASING: _release,
}


async def _take_in(plane: Plane, job: JobRow, attempt: AttemptRow, handle: Handle, *, last: bool = False) -> bool:
    target = plane.load(job.target)

    async def read(offset: int, limit: int) -> bytes:
        return await plane.call("read", target.read(handle, EVENTS_FILE, offset=offset, limit=limit))

    return await ingest(plane.db, attempt.id, read, zone=ZoneInfo(job.spec.zone), last=last)


async def _give_up(plane: Plane, job: JobRow, attempt: AttemptRow, reason: Reason, message: str) -> bool:
    return await plane.apply(lambda conn: _over(conn, job, attempt, poll=None, reason=reason, message=message))


def _checked(db: Database, job: JobRow, attempt: AttemptRow) -> bool:
    """Whether the node has said that its checks let the workload start. Read from the rows: a restart forgets."""
    if job.spec.preflight.level == 0:
        return True
    row = reads.find_event(db, attempt.id, phase="PREFLIGHT", event="end")
    go: set[Any] = {Overall.PASS, Overall.WARN}
    if job.spec.preflight.allow_incomplete:
        go.add(Overall.INCOMPLETE)
    return row is not None and row.data.get("overall") in go


def _judge(poll: Poll) -> tuple[Reason | None, str]:
    """Why an attempt is over, from the best evidence there is."""
    if poll.report is Report.SUCCEEDED:
        return None, ""
    if poll.exit is not None:
        return poll.exit.reason or Reason.SCRIPT_FAILED, poll.exit.message or poll.note
    if poll.report is Report.LOST:
        return Reason.NODE_LOST, poll.note or "the attempt is gone and left no exit record"
    return Reason.TARGET_ERROR, poll.note or "the target says that it failed, and there is no exit record"


def _over(
    conn: Connection, job: JobRow, attempt: AttemptRow, *, poll: Poll | None, reason: Reason | None, message: str
) -> bool:
    """Note how an attempt ended. Without a poll it never came to run, and there is nothing to collect."""
    to = Stage.COLLECTING if poll is not None else Stage.RELEASING
    if not _move(conn, job, to, reason=reason, message=message):
        return False
    writes.end_attempt(
        conn,
        attempt.id,
        report=poll.report if poll is not None else None,
        reason=reason,
        message=message,
        exit_record=poll.exit if poll is not None else None,
        at=datetime.now(UTC),
    )
    return True


def _move(conn: Connection, job: JobRow, to: Stage, *, reason: Reason | None = None, message: str = "") -> bool:
    assert job.stage is not None
    return writes.advance(conn, job.id, seen=job.stage, to=to, at=datetime.now(UTC), reason=reason, message=message)


def _end(conn: Connection, job: JobRow, status: Status, reason: Reason | None, message: str) -> bool:
    assert job.stage is not None
    at = datetime.now(UTC)
    return writes.finish(conn, job.id, seen=job.stage, status=status, reason=reason, message=message, at=at)
