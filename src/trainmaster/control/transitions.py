"""How a stage, an attempt and a job come to their end: the moves of a job, each with its news, and what happens late.

Every change here goes through `Plane.apply`, and through the two doors of store.writes (advance, finish).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

from trainmaster.control.context import Context
from trainmaster.control.deadlines import find_stop_request
from trainmaster.control.notify.job_news import put_job_news
from trainmaster.core.errors import NoCapacity, StorageError, TargetError, Unreachable, UsageError
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.store import attempts, events, jobs
from trainmaster.store.capacity import queue
from trainmaster.store.database import Connection, Database
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import Poll, Rents, Target, find_traits


async def last_attempt(context: Context, job: JobRow) -> AttemptRow:
    return (await asyncio.to_thread(attempts.list_attempts, context.db, job.id))[-1]


def judge(poll: Poll) -> tuple[Reason | None, str]:
    """Why an attempt is over, from the best evidence there is."""
    if poll.state is TargetState.SUCCEEDED:
        return None, ""
    if poll.exit is not None:
        return poll.exit.reason or Reason.SCRIPT_FAILED, poll.exit.message or poll.note
    if poll.state is TargetState.LOST:
        return poll.reason or Reason.NODE_LOST, poll.note or "the attempt is gone and left no exit record"
    return Reason.TARGET_ERROR, poll.note or "the target says that it failed, and there is no exit record"


async def abandon(
    context: Context, job: JobRow, attempt: AttemptRow, reason: Reason, message: str, *, sent: bool = True
) -> bool:
    """End an attempt that never came to run: there is nothing to collect, and to release only what was sent."""
    return await end_attempt(
        context, job, attempt, poll=None, reason=reason, message=message, to=Stage.RELEASING, sent=sent
    )


async def end_attempt(
    context: Context,
    job: JobRow,
    attempt: AttemptRow,
    *,
    poll: Poll | None,
    reason: Reason | None,
    message: str,
    to: Stage = Stage.COLLECTING,
    sent: bool = True,
) -> bool:
    """Note how an attempt ended. Without a poll the target did not say so: we end it."""
    report, exit_record = (poll.state, poll.exit) if poll is not None else (attempt.report, None)

    def change(conn: Connection) -> bool:
        if not move(conn, context, job, to, reason=reason, message=message):
            return False
        attempts.end_attempt(
            conn, attempt.id, report=report, reason=reason, message=message, exit_record=exit_record, at=context.now()
        )
        if not sent:
            attempts.set_handle(conn, attempt.id, {**(attempt.handle or {}), "unsent": True})
            attempts.mark_released(conn, attempt.id, at=context.now())
        return True

    return await context.apply(job.id, change, what="over")


async def finish_attempt(context: Context, job: JobRow, attempt: AttemptRow, message: str) -> bool:
    """An attempt is over and holds nothing: the job ends with it, or is queued again."""
    reason = attempt.reason
    if attempt.report is TargetState.SUCCEEDED:
        return await end_job(context, job, Status.COMPLETED, None, message)
    if job.cancel_requested or reason is Reason.USER_CANCELLED:
        return await end_job(context, job, Status.CANCELLED, Reason.USER_CANCELLED, message)
    assert reason is not None, "an attempt that did not succeed has a reason"
    tried = await asyncio.to_thread(attempts.list_attempts, context.db, job.id)
    may_retry = job.spec.limits.retry.get(reason.value)
    if may_retry is None:
        may_retry = reason.rule.retry or (reason.rule.by_progress and await _goes_on_saving(context, tried))
    unsent = sum(bool((each.handle or {}).get("unsent")) for each in tried)
    preempted = await asyncio.to_thread(queue.count_preempted, context.db, job.id)
    free = min(unsent, UNSENT) + await count_rerolls(context, job) + preempted
    if not may_retry or unsent == job.attempts or job.attempts - free >= job.spec.limits.attempts:
        return await end_job(context, job, Status.FAILED, reason, message)
    again = f"attempt {attempt.number} ended: {message}"
    until: datetime | None = context.now() + timedelta(seconds=context.rest_s(reason, attempt.number))
    if reason is Reason.PREEMPTED and attempt.stop_reason is reason:
        until = None  # our own queue stopped it, and knows when there is room again

    def change(conn: Connection) -> bool:
        at = context.now()
        if not jobs.advance(
            conn, job.id, seen=Stage.RELEASING, to=Stage.QUEUED, at=at, reason=reason, message=again, rest_until=until
        ):
            return False
        put_job_news(conn, job, "job.retried", about=str(attempt.number), reason=reason, message=again, at=at)
        return True

    return await context.apply(job.id, change, what="queued again")


_FRUITLESS = 2  # attempts in a row without a new checkpoint: then a failure of the program is believed


async def _goes_on_saving(context: Context, tried: Sequence[AttemptRow]) -> bool:
    """Whether one of the last attempts saved something: what failed then was not the program from its start."""
    return any([await asyncio.to_thread(_has_saved, context.db, attempt) for attempt in tried[-_FRUITLESS:]])


def _has_saved(db: Database, attempt: AttemptRow) -> bool:
    if attempt.exit is not None and attempt.exit.saved_since:
        return True
    return events.find_event(db, attempt.id, phase="CHECKPOINT", event="saved") is not None


# Attempts of which nothing was sent, because a key or credentials are missing here, do not count towards
# limits.attempts, so often: with the rests between them that is half a day. A job that never began ends at once.
UNSENT = 50


# A rented machine that was bad before the workload began does not count towards limits.attempts, so often.
REROLLS = 3
_REROLLED = frozenset({Reason.CHECK_FAILED, Reason.BAD_MACHINE})


async def count_rerolls(context: Context, job: JobRow) -> int:
    """Attempts of a job that do not count towards limits.attempts."""
    if not isinstance(context.load(job.target), Rents):
        return 0
    tried = await asyncio.to_thread(attempts.list_attempts, context.db, job.id)
    return min(REROLLS, sum(map(_is_reroll, tried)))


def _is_reroll(attempt: AttemptRow) -> bool:
    started = bool((attempt.handle or {}).get("submitted"))
    return attempt.reason in _REROLLED or (not started and attempt.reason in (Reason.NODE_LOST, Reason.PREEMPTED))


async def end_job(context: Context, job: JobRow, status: Status, reason: Reason | None, message: str) -> bool:
    seen = job.stage
    assert seen is not None

    def change(conn: Connection) -> bool:
        at = context.now()
        if not jobs.finish(conn, job.id, seen=seen, status=status, reason=reason, message=message, at=at):
            return False
        put_job_news(conn, job, f"job.{status.value}", status=status, reason=reason, message=message, at=at)
        return True

    return await context.apply(job.id, change, what=status.value)


def move(
    conn: Connection, context: Context, job: JobRow, to: Stage, *, reason: Reason | None = None, message: str = ""
) -> bool:
    assert job.stage is not None
    at = context.now()
    if not jobs.advance(conn, job.id, seen=job.stage, to=to, at=at, reason=reason, message=message):
        return False
    if to is Stage.RUNNING:
        # Once: the next attempt is told as a retry.
        put_job_news(conn, job, "job.started", status=Status.RUNNING, at=at)
    return True


async def end_overdue(context: Context, job: JobRow, error: Exception) -> bool:
    """After a step that failed: end what has had its time. True if the job moved."""
    if job.stage in (None, Stage.QUEUED) or isinstance(error, NoCapacity):
        return False
    attempt = await last_attempt(context, job)
    if job.stage is Stage.RELEASING and attempt.released_at is None:
        await _alarm(context, job, attempt, error)
        # What is rented is looked for at every listing, also after its job: it is worth asking for a day.
        refused = isinstance(error, (TargetError, UsageError)) and not isinstance(error, Unreachable)
        refused = refused and not isinstance(_load(context, job), Rents)
        if not context.deadlines.must_leave(job, context.now(), refused=refused):
            return False
        return await _leave(context, job, attempt, error)
    if job.stage in (Stage.CHECKING, Stage.RUNNING):
        return await _end_unwatched(context, job, attempt, error)
    rented = job.stage is Stage.COLLECTING and isinstance(context.load(job.target), Rents)
    if not context.deadlines.is_late(job, context.now(), rented=rented):
        if rented:
            await _tell_of_storing(context, job, attempt, error)
        return False
    if job.stage in (Stage.PLACING, Stage.PROVISIONING, Stage.CONNECTING, Stage.STAGING):
        reason = Reason.STORAGE_ERROR if isinstance(error, StorageError) else Reason.TARGET_ERROR
        sent = job.stage is not Stage.PLACING
        return await abandon(context, job, attempt, reason, f"{job.stage} did not come to an end: {error}", sent=sent)
    note = f"{attempt.message}; not all that it left could be kept: {error}".removeprefix("; ")
    if job.stage is Stage.RELEASING:
        return await finish_attempt(context, job, attempt, note)

    def change(conn: Connection) -> bool:
        attempts.note_attempt(conn, attempt.id, note)
        return move(conn, context, job, Stage.RELEASING, reason=attempt.reason, message=note)

    return await context.apply(job.id, change, what="leave collecting")


async def _end_unwatched(context: Context, job: JobRow, attempt: AttemptRow, error: Exception) -> bool:
    """End an attempt whose handler fails: asked to stop long ago, or not watchable for too long."""
    request = find_stop_request(job, attempt)
    if request is not None and context.deadlines.must_force(job, request, context.now()):
        message = f"{request.text}; it could not be watched and is ended by force: {error}"
        return await end_attempt(context, job, attempt, poll=None, reason=request.reason, message=message)
    if not context.deadlines.is_late(job, context.now()):
        return False
    reason = Reason.CHECK_INCOMPLETE if job.stage is Stage.CHECKING else Reason.NODE_LOST
    message = f"{job.stage} did not come to an end: {error}"
    return await end_attempt(context, job, attempt, poll=None, reason=reason, message=message)


def _load(context: Context, job: JobRow) -> Target | None:
    try:
        return context.load(job.target)
    except (TargetError, UsageError):
        return None


async def _leave(context: Context, job: JobRow, attempt: AttemptRow, error: Exception) -> bool:
    """End a job whose attempt cannot be released: with what may be left, and the command that removes it.

    Not followed by another attempt: both might run. The row stays unreleased, by which `reap` finds it.
    """
    traits = find_traits(job.target)
    costs = " and cost money" if traits is None or traits.paid else ""
    left = f"attempt {attempt.id} could not be released ({error}) and may still run{costs}"
    message = f"{attempt.message}; {left}; `trainmaster reap --on {job.target}` ends it".removeprefix("; ")
    if attempt.report is TargetState.SUCCEEDED:
        return await end_job(context, job, Status.COMPLETED, None, message)
    if job.cancel_requested or attempt.reason is Reason.USER_CANCELLED:
        return await end_job(context, job, Status.CANCELLED, Reason.USER_CANCELLED, message)
    return await end_job(context, job, Status.FAILED, attempt.reason or Reason.TARGET_ERROR, message)


async def _alarm(context: Context, job: JobRow, attempt: AttemptRow, error: Exception) -> None:
    """Releasing fails. It is tried for long, but somebody should look: something may be running, and costing."""
    now = context.now()
    times = context.deadlines.leaks(job, now)
    if times:
        text = f"attempt {attempt.number} could not be released and may still hold what it was given: {error}"
        about = f"{attempt.number} {times}"
        await context.apply(
            job.id,
            lambda conn: put_job_news(
                conn, job, "instance.leaked", about=about, reason=attempt.reason, message=text, at=now
            ),
            what="leaked",
        )


async def _tell_of_storing(context: Context, job: JobRow, attempt: AttemptRow, error: Exception) -> None:
    """Outputs cannot be stored, and the machine that holds them costs: somebody may mend the storage before it goes."""
    now, minutes = context.now(), job.spec.rent.collect_minutes
    if context.deadlines.failed_s(job, now) > min(context.deadlines.leak_s, minutes * 30):
        limit = f"its machines are returned after {minutes:g} minutes of this (rent.collect_minutes)"
        text = f"what attempt {attempt.number} left cannot be stored; {limit}: {error}"
        await context.apply(
            job.id,
            lambda conn: put_job_news(
                conn,
                job,
                "job.stalled",
                about=f"{attempt.number} storing",
                reason=Reason.STORAGE_ERROR,
                message=text,
                at=now,
            ),
            what="storing fails",
        )
