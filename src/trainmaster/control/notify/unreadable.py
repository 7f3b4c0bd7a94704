"""What is done for an open job whose stored spec cannot be read: its people are told once, and a queued one is ended.

Of an attempt nothing is done: how long it may save, what is kept of it and what it gives back are in the spec.
"""

from __future__ import annotations

import asyncio
import logging

from trainmaster.control.context import Context, LeaseLost, log_failure
from trainmaster.control.notify.job_news import put_job_news
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.store import jobs
from trainmaster.store.database import Connection
from trainmaster.store.heads import JobHead, find_head

_WHY = "its stored spec cannot be read by this version of Trainmaster"
QUEUED = f"{_WHY}, so it does not start; start the version that stored it, or cancel it and submit it again"
BEGUN = f"{_WHY}: what it runs goes on, and is neither stopped, kept nor given back; start the version that stored it"
NOT_STOPPED = (
    f"cancel requested, and what it runs is not stopped: {_WHY}; start the version that stored it, or end its processes"
    " at its target"
)

log = logging.getLogger(__name__)


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
