"""The cost of one job: so far, per hour now, and forecast at its end."""

from __future__ import annotations

from datetime import UTC, datetime

from trainmaster.api.costs import Cost, JobCost
from trainmaster.core.money.cost import Amount, add_up, burn, forecast
from trainmaster.pages.cost import cents, is_unpriced
from trainmaster.store import costs, jobs
from trainmaster.store.capacity import eta
from trainmaster.store.database import Database

Page = JobCost


def read(db: Database, job_id: str, *, now: datetime | None = None) -> JobCost | None:
    """The cost of a job; None if there is no such job."""
    now = now or datetime.now(UTC)
    job = jobs.find_job(db, job_id)
    if job is None:
        return None
    with db.read() as conn:
        spans = [span for charge in costs.list_charges(conn, jobs=[job_id]) for span in charge.spans]
    amount, per_hour = add_up(spans, now=now), burn(spans)
    left = eta.list_left(db, [job], now=now).get(job_id)
    cap, unpriced = job.spec.limits.max_cost, is_unpriced(job, spans)
    return JobCost(
        job_id=job_id,
        total=Cost(cents=None, known_cents=0, unknown_parts=len(spans)) if unpriced else cost(amount),
        cents_per_hour=per_hour,
        left_s=left,
        forecast_cents=None if unpriced else cents(forecast(amount, cents_per_hour=per_hour, left_s=left)),
        max_cost_cents=cents(None if cap is None else cap * 100),
    )


def cost(amount: Amount) -> Cost:
    """An amount in whole cents."""
    return Cost(cents=cents(amount.cents), known_cents=round(amount.known_cents), unknown_parts=amount.unknown)
