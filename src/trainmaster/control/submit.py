"""What a user asks of the control plane: run this, stop that. Both only write rows; the reconciler does the rest."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from trainmaster import targets
from trainmaster.core.errors import UsageError
from trainmaster.core.spec import JobSpec
from trainmaster.store import Database, reads, writes
from trainmaster.store.rows import JobRow
from trainmaster.targets import Placement, Target


def submit(db: Database, spec: JobSpec, *, load: Callable[[str], Target] = targets.load) -> JobRow:
    """A new job, queued. A target that does not exist or cannot take such a job is refused before there is a row."""
    job_id = str(uuid.uuid4())
    # Planning touches nothing, so a trial of it costs nothing; the folder it names is thrown away.
    load(spec.target).plan(Placement(attempt=f"{job_id}.1", spec=spec, job_folder=Path("/") / job_id))
    with db.write() as conn:
        writes.insert_job(conn, job_id, spec, at=datetime.now(UTC))
    return _known(db, job_id)


def cancel(db: Database, job_id: str) -> JobRow:
    """Ask a job to save and stop. It is cancelled once the reconciler has seen it end."""
    with db.write() as conn:
        accepted = writes.request_cancel(conn, job_id, at=datetime.now(UTC))
    job = _known(db, job_id)
    if not accepted:
        raise UsageError(f"job {job_id} is already {job.status}; there is nothing to cancel")
    return job


def _known(db: Database, job_id: str) -> JobRow:
    job = reads.find_job(db, job_id)
    if job is None:
        raise UsageError(f"there is no job {job_id}; `trainmaster jobs` lists them")
    return job
