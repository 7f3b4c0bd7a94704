"""What the control plane does for a job in each stage: look, act, apply.

Each step is told what the rows say, asks or tells the target, and then writes in one short transaction that holds
only if the job is still where it was seen. No target call is made inside a transaction. A step may be cut off at any
point and taken again: the rows say what was meant before the target is told, and every target call may be repeated.

    queued      wait for devices (dispatch.py); plan; commit the attempt with the handle it will have   (the intent)
    placing     nothing was started yet, for certain
    provisioning, connecting   machines are rented, boot, and are logged in to (rented.py)
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
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import timedelta

from trainmaster.control import budget, rented, workdir
from trainmaster.control.collect import describe_unstored, store_files, store_project
from trainmaster.control.context import Context
from trainmaster.control.deadlines import StopRequest, find_stop_request
from trainmaster.control.inputs import find_pulls
from trainmaster.control.node_events import has_passed_checks, ingest_nodes
from trainmaster.control.notify.job_news import put_job_news
from trainmaster.control.queueing import dispatch
from trainmaster.control.transitions import abandon, end_attempt, end_job, finish_attempt, judge, last_attempt, move
from trainmaster.core.errors import (
    DiskFull,
    NoAccess,
    NoCapacity,
    NodeLost,
    ObjectMissing,
    PathMissing,
    Preempted,
    StorageError,
    TargetError,
    TrainmasterError,
    Unreachable,
    UsageError,
)
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.core.workdir import find_digest
from trainmaster.store import attempts, costs, jobs
from trainmaster.store.capacity import after, devices, machines, order
from trainmaster.store.database import Connection
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import (
    FetchesInputs,
    Handle,
    ListsDevices,
    Places,
    Poll,
    Rents,
    Submission,
    Target,
    find_place,
    find_traits,
)

log = logging.getLogger(__name__)

_SALVAGE_TRIES = 3  # of reading what an attempt left on rented machines, before they are returned anyway


async def handle_stage(context: Context, job: JobRow, attempt: AttemptRow | None = None) -> bool:
    """One step for a job that is not final. True if it moved, and may have more to do at once.

    `attempt` is its last one; not given: it is read.
    """
    assert job.stage is not None, "a final job has no next step"
    if job.stage is Stage.QUEUED:
        return await _queue(context, job)
    attempt = attempt or await last_attempt(context, job)
    assert attempt.handle is not None, "the handle is committed with the attempt"
    return await _HANDLERS[job.stage](context, job, attempt, attempt.handle)


async def _queue(context: Context, job: JobRow) -> bool:
    if job.cancel_requested:
        return await end_job(context, job, Status.CANCELLED, Reason.USER_CANCELLED, "")
    if job.spec.after.jobs and not job.attempts and (ended := await _wait_for_others(context, job)) is not None:
        return ended
    if not dispatch.may_start(context, job):
        return await _leave_queue(context, job)
    number, assigned = job.attempts + 1, dispatch.take_booking(context, job)
    try:
        planned = context.plan(job, number)
    except (TargetError, UsageError) as refused:
        if job.attempts:  # what was there once, a kubeconfig or a hosts file, is mended sooner than the run is repeated
            raise
        # Planning asks nobody: what it refuses now it will refuse for ever.
        return await end_job(context, job, Status.FAILED, Reason.TARGET_ERROR, str(refused))
    handle = {**planned.handle, "devices": assigned} if assigned else planned.handle
    price = budget.price_of(job.spec, handle)
    if job.spec.limits.max_cost is not None and (
        spent := await context.read(budget.refuse_start, job, now=context.now())
    ):
        return await end_job(context, job, Status.FAILED, Reason.OVER_BUDGET, spent)
    if why := await context.read(budget.find_hold, job, price=price, now=context.now()):
        return await _hold(context, job, why)

    def change(conn: Connection) -> bool:
        if not move(conn, context, job, Stage.PLACING):
            return False
        attempt = attempts.insert_attempt(conn, job.id, number, handle=handle, at=context.now())
        costs.set_price(conn, attempt, price)
        if assigned:
            devices.book(conn, find_place(job.target), attempt, assigned, at=context.now())
        elif _is_drained_here(conn, job.target):
            raise devices.DeviceTaken(f"{socket.gethostname()} is drained")
        return True

    try:
        return await context.apply(job.id, change, what="intent")
    except devices.DeviceTaken:
        return False  # another server was first: nothing was written, and the next pass decides again


async def _wait_for_others(context: Context, job: JobRow) -> bool | None:
    """Whether a job that waits for others moved; None where it waits for none any more."""
    before = await asyncio.to_thread(after.list_before, context.db, job.id)
    if not before:
        return None
    if any(other.status is not None and not other.status.final for other in before):
        return False
    failed = [other for other in before if other.status is not Status.COMPLETED]
    if failed and job.spec.after.on == "success":
        other = failed[0]
        how = f"is {other.status.value}" if other.status is not None else "was deleted, so how it ended is not known"
        why = f": {other.message}" if other.message else ""
        text = f"not started: {other.name} ({other.id}), which it waited for, {how}{why}"
        return await end_job(context, job, Status.FAILED, Reason.DEPENDENCY_FAILED, text)
    await context.apply(job.id, lambda conn: after.release(conn, job.id, at=context.now()), what="after")
    return True


async def _hold(context: Context, job: JobRow, why: str) -> bool:
    """Leave a job in the queue while the budget of its project is spent. Our own queue does so before; targets with a
    queue of their own come here, and the budget is looked at as often as it is by those who hold it."""
    if await _leave_queue(context, replace(job, message=why)):
        return True
    until = context.now() + timedelta(seconds=budget.LOOK_S)

    def rest(conn: Connection) -> None:
        jobs.set_backoff(conn, job.id, until=until, tries=0, message=why)

    await context.apply(job.id, rest, what="hold")
    return False


async def _leave_queue(context: Context, job: JobRow) -> bool:
    """End a job that waited longer than its spec allows."""
    longest_s, since = job.spec.queue.max_wait_s, job.stage_since or job.created_at
    if longest_s is None or context.deadlines.elapsed_s(since, context.now()) <= longest_s:
        return False
    text = f"it waited longer than queue.max_wait_s of {longest_s:g} s: {job.message}".removesuffix(": ")
    return await end_job(context, job, Status.FAILED, Reason.TIMED_OUT, text)


def _is_drained_here(conn: Connection, word: str) -> bool:
    """Whether a target's jobs run on this machine, and it is drained."""
    stated = find_traits(word)
    here = stated is not None and stated.here
    return here and machines.is_drained(conn, find_place(word), socket.gethostname())


async def _place(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    if request := find_stop_request(job, attempt):
        return await abandon(context, job, attempt, request.reason, f"{request.text}; it was not started", sent=False)
    target = context.load(job.target)
    if isinstance(target, Rents):  # chosen when it is launched: nothing is reserved before
        return await context.apply(job.id, lambda conn: move(conn, context, job, Stage.PROVISIONING), what="placed")
    if isinstance(target, Places):
        planned = replace(context.plan(job, attempt.number), handle=handle)
        if isinstance(target, ListsDevices) and "devices" not in handle:
            planned = await asyncio.to_thread(_choose_machines, context, job, target, planned)
        try:
            handle = await context.call("place", target.place(planned))
        except (Unreachable, NoCapacity):
            raise
        except (TargetError, UsageError) as refused:
            return await abandon(context, job, attempt, Reason.TARGET_ERROR, str(refused), sent=False)

    def change(conn: Connection) -> bool:
        if handle != attempt.handle:
            attempts.set_handle(conn, attempt.id, handle)
            costs.set_price(conn, attempt.id, budget.price_of(job.spec, handle))
        # Committed before submit is called: from here on something may exist.
        return move(conn, context, job, Stage.STAGING)

    placed = await context.apply(job.id, change, what="placed")
    if placed:
        context.unsent.add(attempt.id)  # this process alone can know: another may have submitted and died
    return placed


def _choose_machines(context: Context, job: JobRow, target: ListsDevices, planned: Submission) -> Submission:
    """What the queue knows of machines that their target gives out by slots: which are closed, which come last."""
    closed = machines.list_machines(context.db, place=find_place(job.target))
    with context.db.read() as conn:
        last = order.find_suspects(conn, target.list_machines(), now=context.now(), checks=context.checks())
    return replace(planned, avoid={row.machine: machines.explain(row) for row in closed}, last=tuple(last))


async def _stage(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    if request := find_stop_request(job, attempt):
        # Submit may or may not have happened; release gives back whatever there is of this attempt.
        return await abandon(context, job, attempt, request.reason, f"{request.text}; it was being started")
    await store_project(context, job)
    unsent = attempt.id in context.unsent
    context.unsent.discard(attempt.id)
    try:
        if find_digest(job.spec.workdir) is not None:
            folder = context.home / "jobs" / job.id
            await asyncio.to_thread(workdir.unpack, context.db, context.storage, job, folder)
        planned = replace(context.plan(job, attempt.number), handle=handle)
        target = context.load(job.target)
        if isinstance(target, FetchesInputs):
            planned = replace(planned, pulls=await asyncio.to_thread(find_pulls, job.spec, context.storage))
        handle = await context.call("submit", target.submit(planned))
    except Unreachable:
        raise
    except NodeLost as lost:
        reason = Reason.PREEMPTED if isinstance(lost, Preempted) else Reason.NODE_LOST
        return await abandon(context, job, attempt, reason, str(lost))
    except (ObjectMissing, PathMissing) as missing:
        return await abandon(context, job, attempt, Reason.BAD_DATA, str(missing))
    except DiskFull as full:
        return await abandon(context, job, attempt, Reason.DISK_FULL, str(full))
    except (TargetError, UsageError) as refused:
        sent = not (unsent and isinstance(refused, (NoAccess, UsageError)))
        return await abandon(context, job, attempt, Reason.TARGET_ERROR, str(refused), sent=sent)

    def change(conn: Connection) -> bool:
        attempts.set_handle(conn, attempt.id, handle)
        costs.set_price(conn, attempt.id, budget.price_of(job.spec, handle))
        return move(conn, context, job, Stage.CHECKING)

    return await context.apply(job.id, change, what="submitted")


async def _watch(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    target = context.load(job.target)
    poll = await _poll(context, target, handle)
    if poll.state.over:
        if job.stage is Stage.CHECKING and await _ran_unseen(context, job, attempt, handle):
            return await context.apply(job.id, lambda conn: _begin(conn, context, job, attempt), what="running")
        reason, message = judge(poll)
        return await end_attempt(context, job, attempt, poll=poll, reason=reason, message=message)
    request = find_stop_request(job, attempt)
    if request and context.deadlines.must_force(job, request, context.now()):
        message = f"{request.text}; it did not stop within {context.deadlines.grace_s(job):g} s and is ended by force"
        return await end_attempt(
            context, job, attempt, poll=None, reason=request.reason, message=message, to=Stage.COLLECTING
        )
    if request:
        await context.call("cancel", target.cancel(handle, reason=f"{request.reason.value}: {request.text}"))
    if poll.state is TargetState.UNKNOWN:
        if not request and (late := context.deadlines.overdue(job, attempt, context.now())):
            return await context.apply(job.id, lambda conn: _request_stop(conn, attempt, late), what="overdue")
        raise Unreachable(poll.note or "the target cannot be asked now")
    await ingest_nodes(context, job, attempt, handle)
    waits = poll.state is TargetState.WAITING
    go = job.stage is Stage.CHECKING and not waits
    go = go and await context.read(has_passed_checks, job, attempt)
    if not go and not request and await _note_overdue_or_stalled(context, job, attempt):
        return True
    note = request.text if request else _silence(job) or poll.note
    if waits and attempt.started_at is not None and not request:
        note = f"it ran, and waits again: {note}"

    def change(conn: Connection) -> bool:
        if poll.state is not attempt.report:
            attempts.record_poll(conn, attempt.id, poll.state, at=context.now())
        if note != job.message:
            jobs.set_message(conn, job.id, note)
        return go and _begin(conn, context, job, attempt)

    if not go and poll.state is attempt.report and note == job.message:
        return False  # nothing is new: most ticks of most jobs cost no write
    return await context.apply(job.id, change, what="running" if go else "seen")


async def _collect(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    try:
        if not await ingest_nodes(context, job, attempt, handle):
            return False
        unstored = describe_unstored(await store_files(context, job, attempt, handle))
    except Unreachable:
        raise
    except TargetError as refused:
        # A machine that answers and refuses will do so in an hour; a rented one is paid for meanwhile.
        if not isinstance(context.load(job.target), Rents) or job.tries < _SALVAGE_TRIES:
            raise
        unstored = f"what it left could not be read: {refused}"
    reason, message = attempt.reason, "; ".join(text for text in (attempt.message, unstored) if text)
    return await context.apply(
        job.id, lambda conn: move(conn, context, job, Stage.RELEASING, reason=reason, message=message), what="collected"
    )


async def _release(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    if handle.get("unsent"):
        await _give_up_place(context, job, handle)
        return await finish_attempt(context, job, attempt, attempt.message)
    target = context.load(job.target)
    if isinstance(target, Rents):
        return await _return(context, job, attempt, handle, target)
    if attempt.released_at is None:
        await context.call("release", target.release(handle))
        await context.apply(
            job.id, lambda conn: attempts.mark_released(conn, attempt.id, at=context.now()), what="released"
        )
        attempt = await last_attempt(context, job)
    # Only now can nobody write any more: what a lost attempt's last processes wrote, and half a line, are taken here.
    if not await ingest_nodes(context, job, attempt, handle, last=True):
        return False
    unstored = describe_unstored(await store_files(context, job, attempt, handle))
    message = "; ".join(text for text in (attempt.message, unstored) if text)
    return await finish_attempt(context, job, attempt, message)


async def _give_up_place(context: Context, job: JobRow, handle: Handle) -> None:
    """Give back machines that were chosen and never used, if they can be asked: else their place lapses by itself."""
    try:
        target = context.load(job.target)
        if isinstance(target, Places) and handle.get("nodes"):
            await context.call("release", target.release(handle))
    except (TargetError, UsageError) as error:
        log.info("job %s: its place at %s is kept until it lapses: %s", job.id, job.target, error)


async def _return(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle, target: Rents) -> bool:
    """As `_release`, in the other order: what the attempt left is on the machines, and ends with them."""
    if attempt.released_at is not None:
        return await finish_attempt(context, job, attempt, attempt.message)
    if handle.get("submitted") and not handle.get("drained"):
        return await _drain(context, job, attempt, handle, target)
    await rented.return_machines(context, job, attempt, handle)
    await context.apply(
        job.id, lambda conn: attempts.mark_released(conn, attempt.id, at=context.now()), what="released"
    )
    return True


async def _drain(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle, target: Rents) -> bool:
    """Kill the attempt on its machines and store the rest of what it wrote, once, before they are terminated."""
    try:
        await context.call("stop", target.stop(handle))
        if not await ingest_nodes(context, job, attempt, handle, last=True):
            return False
        unstored = describe_unstored(await store_files(context, job, attempt, handle))
    except (TargetError, StorageError, OSError) as error:  # also a refusal: its disk may be full or read-only
        if job.tries < _SALVAGE_TRIES:
            raise
        unstored = f"the rest could not be read: {error}"  # every minute costs: what is stored has to do
    message = "; ".join(text for text in (attempt.message, unstored) if text)

    def change(conn: Connection) -> bool:
        attempts.note_attempt(conn, attempt.id, message)
        attempts.set_handle(conn, attempt.id, {**handle, "drained": True})
        return True

    return await context.apply(job.id, change, what="drained")


_HANDLERS: Mapping[Stage, Callable[[Context, JobRow, AttemptRow, Handle], Awaitable[bool]]] = {
    Stage.PLACING: _place,
    Stage.PROVISIONING: rented.provision,
    Stage.CONNECTING: rented.connect,
    Stage.STAGING: _stage,
    Stage.CHECKING: _watch,
    Stage.RUNNING: _watch,
    Stage.COLLECTING: _collect,
    Stage.RELEASING: _release,
}


async def _poll(context: Context, target: Target, handle: Handle) -> Poll:
    try:
        return await context.call("poll", target.poll(handle))
    except Unreachable as error:
        return Poll(state=TargetState.UNKNOWN, note=str(error))


async def _note_overdue_or_stalled(context: Context, job: JobRow, attempt: AttemptRow) -> bool:
    """Note that an attempt takes too long, or that nothing is heard of it. True if that was news."""
    now = context.now()
    if late := context.deadlines.overdue(job, attempt, now):
        return await context.apply(job.id, lambda conn: _request_stop(conn, attempt, late), what="overdue")
    if job.stalled_at is not None or not context.deadlines.is_stalled(job, now):
        return False
    fresh = await asyncio.to_thread(jobs.find_job, context.db, job.id)  # it may just have been heard of
    if fresh is None or not context.deadlines.is_stalled(fresh, now):
        return False
    text = f"nothing was heard of it for {context.deadlines.quiet_s(fresh, now) / 60:.0f} minutes"

    def change(conn: Connection) -> bool:
        if not jobs.mark_stalled(conn, job.id, at=now):
            return False
        about = f"{attempt.number} {now.isoformat(timespec='seconds')}"
        put_job_news(conn, job, "job.stalled", about=about, reason=Reason.STALLED, message=text, at=now)
        if job.spec.limits.on_stall == "stop":
            _request_stop(conn, attempt, StopRequest(reason=Reason.STALLED, since=now, text=text))
        return True

    return await context.apply(job.id, change, what="stalled")


def _request_stop(conn: Connection, attempt: AttemptRow, request: StopRequest) -> bool:
    return attempts.request_stop(conn, attempt.id, reason=request.reason, message=request.text, at=request.since)


def _silence(job: JobRow) -> str:
    return f"nothing was heard of it since {job.heard_at:%Y-%m-%d %H:%M} UTC" if job.stalled_at and job.heard_at else ""


async def _ran_unseen(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    """Whether an attempt that is over came past its checks while nobody looked. The history then says so too: it is
    the same whether we were there or not."""
    with contextlib.suppress(TrainmasterError):  # what cannot be read now is collected later
        await ingest_nodes(context, job, attempt, handle)
        return await asyncio.to_thread(has_passed_checks, context.db, job, attempt)
    return False


def _begin(conn: Connection, context: Context, job: JobRow, attempt: AttemptRow) -> bool:
    attempts.mark_started(conn, attempt.id, at=context.now())
    return move(conn, context, job, Stage.RUNNING)
