"""What a user asks of the control plane: run this, stop that. Both only write rows; the reconciler does the rest."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from trainmaster import targets
from trainmaster.control import budget
from trainmaster.core.errors import JobFinal, JobMissing, SpecError
from trainmaster.core.secrets import find_in_spec
from trainmaster.core.spec import JobSpec
from trainmaster.store import Database, reads, submissions, tokens, trail, writes
from trainmaster.store.rows import JobRow
from trainmaster.targets import Placement, Target

LOCAL = "local"  # who asks on the command line, on the database itself


def submit(db: Database, spec: JobSpec, *, load: Callable[[str], Target] = targets.load, by: str = LOCAL) -> JobRow:
    """A new job, queued. A target that does not exist or cannot take such a job is refused before there is a row."""
    return submit_once(db, spec, key=None, load=load, by=by)[0]


def submit_once(
    db: Database, spec: JobSpec, *, key: str | None, load: Callable[[str], Target] = targets.load, by: str = LOCAL
) -> tuple[JobRow, bool]:
    """The job that stands for this submission, and whether it is new.

    The same key with the same spec gives the same job, however often it is sent; with another spec it is KeyTaken.
    OverBudget where the project has spent what it may; SpecError where a secret stands in the spec.
    """
    if secrets := list(find_in_spec(spec)):  # here and not in the spec itself: rows of earlier days must stay readable
        raise SpecError(secrets)
    job_id = str(uuid.uuid4())
    # Planning touches nothing, so a trial of it costs nothing; the folder it names is thrown away.
    planned = load(spec.target).plan(Placement(attempt=f"{job_id}.1", spec=spec, job_folder=Path("/") / job_id))
    at = datetime.now(UTC)
    name = None if by in tokens.RESERVED else by
    with db.write() as conn:
        job_id, new = submissions.insert_once(conn, job_id, spec, key=key, by=name, at=at)
        if new:
            budget.admit(conn, spec.project, price=budget.price_of(spec, planned.handle), now=at)
            detail = {"name": spec.name, "project": spec.project, "target": spec.target}
            trail.record(conn, who=by, action="job.submit", subject=f"job:{job_id}", detail=detail)
    return _known(db, job_id), new


def cancel(db: Database, job_id: str, *, by: str = LOCAL) -> JobRow:
    """Ask a job to save and stop. It is cancelled once the reconciler has seen it end."""
    with db.write() as conn:
        accepted = writes.request_cancel(conn, job_id, at=datetime.now(UTC))
        if accepted:
            trail.record(conn, who=by, action="job.cancel", subject=f"job:{job_id}")
    job = _known(db, job_id)
    if not accepted:
        raise JobFinal(f"job {job_id} is already {job.status}; there is nothing to cancel")
    return job


def _known(db: Database, job_id: str) -> JobRow:
    job = reads.find_job(db, job_id)
    if job is None:
        raise JobMissing(f"there is no job {job_id}; `trainmaster jobs` lists them")
    return job
