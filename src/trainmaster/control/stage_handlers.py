"""What the control plane does for a job in each stage: look, act, apply.

Each step is told what the rows say, asks or tells the target, and then writes in one short transaction that holds
only if the job is still where it was seen. No target call is made inside a transaction. A step may be cut off at any
point and taken again: the rows say what was meant before the target is told, and every target call may be repeated.

    queued      plan; commit the attempt with the handle it will have        (the intent)
    placing     nothing was started yet, for certain
    staging     keep the project file; submit, or find it submitted
    checking    watch: take events in; preflight goes on
    running     watch: take events in; the workload goes on
    collecting  the attempt is over: take in what it wrote, keep what it left in storage
    releasing   give back what it held, take in and keep the rest; then end the job, or queue it for another attempt

Deadlines are in deadlines.py. News is put in with the change that makes it true.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from zoneinfo import ZoneInfo

from trainmaster.control import budget
from trainmaster.control.collect import keep_files, keep_project
from trainmaster.control.context import Plane
from trainmaster.control.deadlines import Wish, find_wish, is_stalled, quiet_s
from trainmaster.control.ingest import ingest
from trainmaster.control.notify.job_news import tell
from trainmaster.control.transitions import end, finish, give_up, judge, last_attempt, move, over
from trainmaster.core.errors import TargetError, TrainmasterError, Unreachable, UsageError
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.results import Overall
from trainmaster.core.states import Reason, Report, Stage, Status
from trainmaster.store import Connection, Database, attempts, costs, events, jobs
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import Handle, Poll, Target


async def step(plane: Plane, job: JobRow) -> bool:
    """One step for a job that is not final. True if it moved, and may have more to do at once."""
    assert job.stage is not None, "a final job has no next step"
    if job.stage is Stage.QUEUED:
        return await _queue(plane, job)
    attempt = await last_attempt(plane, job)
    assert attempt.handle is not None, "the handle is committed with the attempt"
    return await _STEPS[job.stage](plane, job, attempt, attempt.handle)


async def _queue(plane: Plane, job: JobRow) -> bool:
    if job.cancel_requested:
        return await end(plane, job, Status.CANCELLED, Reason.USER_CANCELLED, "")
    number = job.attempts + 1
    try:
        planned = plane.plan(job, number)
    except (TargetError, UsageError) as refused:
        # Planning asks nobody: what it refuses now it will refuse for ever.
        return await end(plane, job, Status.FAILED, Reason.TARGET_ERROR, str(refused))
    price = budget.price_of(job.spec, planned.handle)
    if spent := await asyncio.to_thread(budget.refuse_start, plane.db, job, price=price, now=plane.now()):
        return await end(plane, job, Status.FAILED, Reason.OVER_BUDGET, spent)

    def change(conn: Connection) -> bool:
        if not move(conn, plane, job, Stage.PLACING):
            return False
        attempt = attempts.insert_attempt(conn, job.id, number, handle=planned.handle, at=plane.now())
        costs.set_price(conn, attempt, price)
        return True

    return await plane.apply(job.id, change, what="intent")


async def _place(plane: Plane, job: JobRow, attempt: AttemptRow, _handle: Handle) -> bool:
    if wish := find_wish(job, attempt):
        return await give_up(plane, job, attempt, wish.reason, f"{wish.text}; it was not started")
    # Committed before submit is called: from here on something may exist.
    return await plane.apply(job.id, lambda conn: move(conn, plane, job, Stage.STAGING), what="placed")


async def _stage(plane: Plane, job: JobRow, attempt: AttemptRow, _handle: Handle) -> bool:
    if wish := find_wish(job, attempt):
        # Submit may or may not have happened; release gives back whatever there is of this attempt.
        return await give_up(plane, job, attempt, wish.reason, f"{wish.text}; it was being started")
    await keep_project(plane, job)
    try:
        handle = await plane.call("submit", plane.load(job.target).submit(plane.plan(job, attempt.number)))
    except Unreachable:
        raise
    except (TargetError, UsageError) as refused:
        return await give_up(plane, job, attempt, Reason.TARGET_ERROR, str(refused))

    def change(conn: Connection) -> bool:
        attempts.set_handle(conn, attempt.id, handle)
        costs.set_price(conn, attempt.id, budget.price_of(job.spec, handle))
        return move(conn, plane, job, Stage.CHECKING)

    return await plane.apply(job.id, change, what="submitted")


async def _watch(plane: Plane, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    target = plane.load(job.target)
    poll = await _poll(plane, target, handle)
    if poll.report.over:
        if job.stage is Stage.CHECKING and await _ran_unseen(plane, job, attempt, handle):
            return await plane.apply(job.id, lambda conn: _begin(conn, plane, job, attempt), what="running")
        reason, message = judge(poll)
        return await over(plane, job, attempt, poll=poll, reason=reason, message=message)
    wish = find_wish(job, attempt)
    if wish and plane.deadlines.must_force(job, wish, plane.now()):
        message = f"{wish.text}; it did not stop within {plane.deadlines.grace_s(job):g} s and is ended by force"
        return await over(plane, job, attempt, poll=None, reason=wish.reason, message=message, to=Stage.COLLECTING)
    if wish:
        await plane.call("cancel", target.cancel(handle, reason=f"{wish.reason.value}: {wish.text}"))
    if poll.report is Report.UNKNOWN:
        raise Unreachable(poll.note or "the target cannot be asked now")
    await _take_in(plane, job, attempt, handle)
    waits = poll.report is Report.WAITING
    go = job.stage is Stage.CHECKING and not waits and await asyncio.to_thread(_checked, plane.db, job, attempt)
    if not go and not wish and await _object(plane, job, attempt):
        return True
    note = wish.text if wish else _silence(job) or poll.note

    def change(conn: Connection) -> bool:
        attempts.record_poll(conn, attempt.id, poll.report, at=plane.now())
        jobs.set_message(conn, job.id, note)
        return go and _begin(conn, plane, job, attempt)

    if not go and poll.report is attempt.report and note == job.message:
        return False  # nothing is new: most ticks of most jobs cost no write
    return await plane.apply(job.id, change, what="running" if go else "seen")


async def _collect(plane: Plane, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    if not await _take_in(plane, job, attempt, handle):
        return False
    await keep_files(plane, job, attempt, handle)
    reason, message = attempt.reason, attempt.message
    return await plane.apply(
        job.id, lambda conn: move(conn, plane, job, Stage.RELEASING, reason=reason, message=message), what="collected"
    )


async def _release(plane: Plane, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    if attempt.released_at is None:
        await plane.call("release", plane.load(job.target).release(handle))
        await plane.apply(
            job.id, lambda conn: attempts.mark_released(conn, attempt.id, at=plane.now()), what="released"
        )
        attempt = await last_attempt(plane, job)
    # Only now can nobody write any more: what a lost attempt's last processes wrote, and half a line, are taken here.
    if not await _take_in(plane, job, attempt, handle, last=True):
        return False
    await keep_files(plane, job, attempt, handle)
    return await finish(plane, job, attempt, attempt.message)


_STEPS: Mapping[Stage, Callable[[Plane, JobRow, AttemptRow, Handle], Awaitable[bool]]] = {
    Stage.PLACING: _place,
    Stage.STAGING: _stage,
    Stage.CHECKING: _watch,
    Stage.RUNNING: _watch,
    Stage.COLLECTING: _collect,
    Stage.RELEASING: _release,
}


async def _poll(plane: Plane, target: Target, handle: Handle) -> Poll:
    try:
        return await plane.call("poll", target.poll(handle))
    except Unreachable as wrong:
        return Poll(report=Report.UNKNOWN, note=str(wrong))


async def _take_in(plane: Plane, job: JobRow, attempt: AttemptRow, handle: Handle, *, last: bool = False) -> bool:
    target = plane.load(job.target)

    async def read(offset: int, limit: int) -> bytes:
        return await plane.call("read", target.read(handle, EVENTS_FILE, offset=offset, limit=limit))

    return await ingest(plane.db, attempt.id, read, zone=ZoneInfo(job.spec.zone), last=last)


async def _object(plane: Plane, job: JobRow, attempt: AttemptRow) -> bool:
    """Note that an attempt takes too long, or that nothing is heard of it. True if that was news."""
    now = plane.now()
    if late := plane.deadlines.overdue(job, attempt, now):
        return await plane.apply(job.id, lambda conn: _want_stop(conn, attempt, late), what="overdue")
    if job.stalled_at is not None or not is_stalled(job, now):
        return False
    fresh = await asyncio.to_thread(jobs.find_job, plane.db, job.id)  # it may just have been heard of
    if fresh is None or not is_stalled(fresh, now):
        return False
    text = f"nothing was heard of it for {quiet_s(fresh, now) / 60:.0f} minutes"

    def change(conn: Connection) -> bool:
        if not jobs.mark_stalled(conn, job.id, at=now):
            return False
        about = f"{attempt.number} {now.isoformat(timespec='seconds')}"
        tell(conn, job, "job.stalled", about=about, reason=Reason.STALLED, message=text, at=now)
        if job.spec.limits.on_stall == "stop":
            _want_stop(conn, attempt, Wish(reason=Reason.STALLED, since=now, text=text))
        return True

    return await plane.apply(job.id, change, what="stalled")


def _want_stop(conn: Connection, attempt: AttemptRow, wish: Wish) -> bool:
    return attempts.request_stop(conn, attempt.id, reason=wish.reason, message=wish.text, at=wish.since)


def _silence(job: JobRow) -> str:
    return f"nothing was heard of it since {job.heard_at:%Y-%m-%d %H:%M} UTC" if job.stalled_at and job.heard_at else ""


async def _ran_unseen(plane: Plane, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    """Whether an attempt that is over came past its checks while nobody looked. The history then says so too: it is
    the same whether we were there or not."""
    with contextlib.suppress(TrainmasterError):  # what cannot be read now is collected later
        await _take_in(plane, job, attempt, handle)
        return await asyncio.to_thread(_checked, plane.db, job, attempt)
    return False


def _begin(conn: Connection, plane: Plane, job: JobRow, attempt: AttemptRow) -> bool:
    attempts.mark_started(conn, attempt.id, at=plane.now())
    return move(conn, plane, job, Stage.RUNNING)


def _checked(db: Database, job: JobRow, attempt: AttemptRow) -> bool:
    """Whether the node has said that its checks let the workload start. Read from the rows: a restart forgets."""
    if job.spec.preflight.level == 0:
        return True
    row = events.find_event(db, attempt.id, phase="PREFLIGHT", event="end")
    go: set[Any] = {Overall.PASS, Overall.WARN}
    if job.spec.preflight.allow_incomplete:
        go.add(Overall.INCOMPLETE)
    return row is not None and row.data.get("overall") in go
