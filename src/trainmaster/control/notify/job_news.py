"""Notifications about a job, inserted in the transaction of the change that they report."""

from __future__ import annotations

from datetime import datetime

from trainmaster.control.notify import outbox
from trainmaster.core.failures import find_action
from trainmaster.core.states import Reason, Status
from trainmaster.store.database import Connection
from trainmaster.store.heads import JobHead
from trainmaster.store.rows import JobRow


def put_job_news(
    conn: Connection,
    job: JobRow | JobHead,
    topic: str,
    *,
    at: datetime,
    about: str = "",
    status: Status | None = None,
    reason: Reason | None = None,
    message: str = "",
) -> None:
    """One piece of news on a job. `about` tells apart what may happen to a job more than once."""
    payload = {
        "job": job.id,
        "name": job.name,
        "project": job.project,
        "status": str(status if status is not None else job.status),
        "reason": reason and reason.value,
        "message": message,
        "action": find_action(reason, message),
        "url": f"/jobs/{job.id}",
        "at": at.isoformat(timespec="milliseconds"),
    }
    key = f"{topic} {job.id} {about}".rstrip()
    outbox.put(conn, key=key, topic=topic, project=job.project, job_id=job.id, payload=payload, at=at)
