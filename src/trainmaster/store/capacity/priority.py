"""The priority of a job that waits, in its stored spec: where all who read the queue find it."""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from trainmaster.core.config.queue import Queue
from trainmaster.core.states import Stage
from trainmaster.store import tables as t

_J = t.jobs.c


def set_priority(conn: Connection, job_id: str, word: str) -> str | None:
    """The priority that a queued job had before; None where it is not queued or is to be cancelled: nothing changed.

    The row is held: a reconciler that places the job meanwhile has either done so before, or waits for this change.
    """
    query = select(_J.spec, _J.stage, _J.cancel_requested).where(_J.id == job_id).with_for_update()
    row = conn.execute(query).first()
    if row is None or row.stage != Stage.QUEUED.value or row.cancel_requested:
        return None
    queue = row.spec.get("queue") or {}
    before: str = queue.get("priority", Queue().priority)
    if before != word:
        spec = {**row.spec, "queue": {**queue, "priority": word}}
        conn.execute(update(t.jobs).where(_J.id == job_id).values(spec=spec))
    return before
