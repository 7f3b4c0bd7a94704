"""What the GPUs of one job did: its ledger, in all or in a month."""

from __future__ import annotations

from datetime import UTC, datetime

from trainmaster.api.goodput import JobGoodput
from trainmaster.core.money.cost import month_of
from trainmaster.pages.goodput import job_goodput, list_booked
from trainmaster.store import costs
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job

Page = JobGoodput


def read(db: Database, job_id: str, *, month: datetime | None = None, now: datetime | None = None) -> JobGoodput | None:
    """The ledger of a job; None if there is no such job."""
    now = now or datetime.now(UTC)
    with db.read() as conn:
        job = find_job(db, job_id)
        if job is None:
            return None
        # The jobs of its run, too: steps that an earlier one has trained are repeated work here.
        run = costs.list_run(conn, job.spec.resume_from)
        window = month_of(month) if month is not None else None
        name = f"{window.start:%Y-%m}" if window is not None else None
        booked = next(
            item for item in list_booked(conn, jobs={job_id, *run}, window=None, now=now) if item.job.id == job_id
        )
    if name is not None:
        months = {when: tally for when, tally in booked.months.items() if when == name}
        booked = type(booked)(job=booked.job, ledger=booked.ledger, months=months)
    return job_goodput(booked, month=name)
