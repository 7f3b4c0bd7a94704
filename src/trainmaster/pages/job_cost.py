"""The cost of one job: so far, per hour now, and forecast at its end."""

from __future__ import annotations

from datetime import UTC, datetime

from trainmaster.api.costs import Cost, JobCost
from trainmaster.core.money.cost import Amount, add_up, burn, round_cents
from trainmaster.pages.cost import cap_cents, find_bound, forecast_job, is_unpriced, list_earlier
from trainmaster.store import costs, jobs
from trainmaster.store.capacity import eta
from trainmaster.store.database import Database


def read(db: Database, job_id: str, *, now: datetime | None = None) -> JobCost | None:
    """The cost of a job; None if there is no such job."""
    now = now or datetime.now(UTC)
    job = jobs.find_job(db, job_id)
    if job is None:
        return None
    with db.read() as conn:
        spans = [span for charge in costs.list_charges(conn, jobs=[job_id]) for span in charge.spans]
        earlier_cents = list_earlier(conn, [job], now=now).get(job_id, 0.0)
    amount, per_hour = add_up(spans, now=now), burn(spans)
    left = eta.list_left(db, [job], now=now).get(job_id)
    timeout, unpriced = eta.list_timeouts(db, [job], now=now).get(job_id), is_unpriced(job, spans)
    ahead = forecast_job(job, amount, per_hour, left_s=left, timeout_s=timeout, earlier_cents=earlier_cents)
    return JobCost(
        job_id=job_id,
        total=Cost(cents=None, known_cents=0, unknown_parts=len(spans)) if unpriced else cost(amount),
        cents_per_hour=per_hour,
        left_s=left,
        forecast_cents=None if unpriced else ahead,
        max_cost_cents=round_cents(cap_cents(job)),
        forecast_bound=find_bound(amount, ahead, per_hour, left_s=left, timeout_s=timeout),
    )


def cost(amount: Amount) -> Cost:
    """An amount, rounded: whole cents from one cent on."""
    known = round_cents(amount.known_cents)
    return Cost(cents=round_cents(amount.cents), known_cents=known, unknown_parts=amount.unknown)
