"""What the GPUs of one job did: its ledger, in all or in a month."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from trainmaster.api.goodput import JobGoodput
from trainmaster.core.money.cost import month_of
from trainmaster.pages.goodput import Booked, job_goodput, list_booked
from trainmaster.store import costs
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job


def read(db: Database, job_id: str, *, month: datetime | None = None, now: datetime | None = None) -> JobGoodput | None:
    """The ledger of a job; None if there is no such job."""
    booked = book_job(db, job_id, now=now or datetime.now(UTC))
    if booked is None or month is None:
        return job_goodput(booked) if booked is not None else None
    name = f"{month_of(month).start:%Y-%m}"
    months = {when: tally for when, tally in booked.months.items() if when == name}
    return job_goodput(replace(booked, months=months), month=name)


def book_job(db: Database, job_id: str, *, now: datetime) -> Booked | None:
    """A job with its ledger; None if there is no such job."""
    with db.read() as conn:
        job = find_job(db, job_id)
        if job is None:
            return None
        # The jobs of its run, too: steps that an earlier one has trained are repeated work here.
        run = costs.list_run(conn, job.spec.resume_from)
        listed = list_booked(conn, jobs={job_id, *run}, window=None, now=now)
        return next(item for item in listed if item.job.id == job_id)
