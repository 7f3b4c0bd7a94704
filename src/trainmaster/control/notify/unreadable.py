"""What is done for an open job whose stored spec cannot be read: its people are told once, and it is ended if it must.

A queued one that was cancelled ends here. An attempt that was asked to stop, or that is over, goes on to its end as
that of any job: the target is reached by the handle, which is in the attempt's row. One that runs is left to run.
"""

from __future__ import annotations

import asyncio
import logging

from trainmaster.control.context import Context, LeaseLost, log_failure
from trainmaster.control.deadlines import find_stop_request
from trainmaster.control.notify.job_news import put_job_news
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.store import jobs
from trainmaster.store.database import Connection
from trainmaster.store.heads import JobHead, find_head
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.store.stand_ins import find_stand_in

_WHY = "its stored spec cannot be read by this version of Trainmaster"
QUEUED = f"{_WHY}, so it does not start; start the version that stored it, or cancel it and submit it again"
BEGUN = f"{_WHY}: what it runs goes on, and nothing of it is kept; start the version that stored it, or cancel it"
NOT_STOPPED = (
    "cancel requested, and what it runs is not stopped: neither its stored spec nor its attempt can be read by this"
    " version of Trainmaster; start the version that stored it, or end its processes at its target"
)

log = logging.getLogger(__name__)


async def find_to_end(context: Context, job_id: str) -> tuple[JobRow, AttemptRow] | None:
    """The job and its attempt where that is to be ended, or kept and given back; None where it may go on."""
    found = await asyncio.to_thread(find_stand_in, context.db, job_id)
    if found is None or found[0].stage is Stage.QUEUED:
        return None
    over = found[0].stage in (Stage.COLLECTING, Stage.RELEASING)
    return found if over or find_stop_request(*found) is not None else None


async def tell(context: Context, job_id: str) -> None:
    """Say once in the job's message and in its news what is not done. Never raises."""
    try:
        job = await asyncio.to_thread(find_head, context.db, job_id)
        if job is None or job.final:
            return
        if job.stage == Stage.QUEUED and job.cancel_requested:
            await _end(context, job)
            return
        text = QUEUED if job.stage == Stage.QUEUED else NOT_STOPPED if job.cancel_requested else BEGUN
        if job.message != text:
            await context.apply(job_id, lambda conn: _note(conn, context, job, text), what="unreadable")
    except LeaseLost:
        log.info("job %s is another reconciler's now", job_id)
    except Exception as error:
        log_failure(log, f"job {job_id}: nobody could be told that it cannot be read", error)


def _note(conn: Connection, context: Context, job: JobHead, text: str) -> None:
    jobs.set_message(conn, job.id, text)
    about = "unreadable cancelled" if job.cancel_requested else "unreadable"
    put_job_news(conn, job, "job.stalled", about=about, message=text, at=context.now())


async def _end(context: Context, job: JobHead) -> None:
    """End a queued job that was cancelled: nothing is held for it."""

    def change(conn: Connection) -> None:
        at, why, text = context.now(), Reason.USER_CANCELLED, f"cancelled while it was queued; {_WHY}"
        if jobs.finish(conn, job.id, seen=Stage.QUEUED, status=Status.CANCELLED, reason=why, message=text, at=at):
            put_job_news(conn, job, "job.cancelled", status=Status.CANCELLED, reason=why, message=text, at=at)

    await context.apply(job.id, change, what=Status.CANCELLED.value)
