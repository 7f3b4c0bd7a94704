"""Change the priority of a job that waits in our own queue. What it has waited counts as before."""

from __future__ import annotations

from trainmaster import targets
from trainmaster.control.submit import LOCAL, known
from trainmaster.core.config.queue import PRIORITIES
from trainmaster.core.errors import Fault, NotWaiting, SpecError
from trainmaster.core.states import Stage
from trainmaster.store import audit
from trainmaster.store.capacity import queue
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow


def change(db: Database, job_id: str, word: str, *, by: str = LOCAL) -> JobRow:
    """The job with its new priority, which the queue heeds at its next pass.

    NotWaiting where it has its machines or is over, and where another queue decides; SpecError on an unknown word.
    """
    job = known(db, job_id)
    if word not in PRIORITIES:
        message = f"{word!r:.80} is no priority of the server's queue; write one of {', '.join(PRIORITIES)}"
        raise SpecError([Fault(path="queue.priority", message=message)])
    if not targets.waits_here(job.target):
        name = targets.split(job.target)[1]
        message = f"job {job_id} is of {name}, whose jobs do not wait in the server's own queue: cancel it, and submit"
        raise NotWaiting(f"{message} it again with queue.priority={word}")
    with db.write() as conn:
        before = queue.set_priority(conn, job_id, word)
        if before not in (None, word):
            detail = {"from": before, "to": word}
            audit.record(conn, who=by, action="job.priority", subject=f"job:{job_id}", detail=detail)
    job = known(db, job_id)
    if before is None:
        raise NotWaiting(_explain(job))
    return job


def may_change(job: JobRow) -> bool:
    """Whether the job waits in our own queue now."""
    return job.stage is Stage.QUEUED and not job.cancel_requested and targets.waits_here(job.target)


def _explain(job: JobRow) -> str:
    if job.status.final:
        return f"job {job.id} is already {job.status}; its priority decides nothing any more"
    if job.cancel_requested:
        return f"job {job.id} is being cancelled; its priority decides nothing any more"
    return f"job {job.id} has its machines already; only the priority of a job that waits can be changed"
