"""What jobs and projects cost: in a month or in all, with what each job will have cost, and what projects may spend."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime

from trainmaster import targets
from trainmaster.api.costs import BudgetLine, CostPage, JobSpending, ProjectSpending
from trainmaster.core.money.cost import Amount, Span, Window, add_up, burn, forecast, month_of
from trainmaster.store import costs, eta
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow

MOST = 200  # jobs on one page


Page = CostPage


def read(
    db: Database,
    *,
    job: str | None = None,
    project: str | None = None,
    month: datetime | None = None,
    limit: int = 50,
    now: datetime | None = None,
) -> CostPage:
    """Costs of one job, of a project or of all; in the month that a time is in, or from the beginning."""
    now = now or datetime.now(UTC)
    window = month_of(month) if month is not None else None
    with db.read() as conn:
        charges = costs.list_charges(conn, jobs=[job] if job is not None else (), project=project, window=window)
        unpriced = costs.list_unpriced(conn, free=_free_targets(), project=project)
        budgets = costs.list_budgets(conn, project=project) if job is None else []
        lines = tuple(_budget(row, costs.spent(conn, row.project, now=now, window=row.window(now))) for row in budgets)
    spans: dict[str, list[Span]] = {}
    groups: dict[str, dict[str, list[Span]]] = {}
    for charge in charges:
        spans.setdefault(charge.job_id, []).extend(charge.spans)
        groups.setdefault(charge.project, {}).setdefault(charge.job_id, []).extend(charge.spans)
    amounts = {job_id: add_up(job_spans, now=now, window=window) for job_id, job_spans in spans.items()}
    dearest = sorted(amounts, key=lambda job_id: (-amounts[job_id].known_cents, job_id))[: max(1, min(limit, MOST))]
    rows = [row for job_id in dearest if (row := find_job(db, job_id)) is not None]
    left = eta.list_left(db, rows, now=now)
    whole = costs.job_costs(db, dearest, now=now) if window is not None else amounts
    return CostPage(
        month=f"{window.start:%Y-%m}" if window is not None else None,
        project=project,
        jobs=tuple(_job(row, spans[row.id], amounts[row.id], whole[row.id], left.get(row.id)) for row in rows),
        more=len(amounts) - len(rows),
        projects=tuple(_project(name, groups[name], unpriced, now, window) for name in sorted(groups)),
        budgets=lines,
        made_at=now,
    )


def figures(db: Database, jobs: Iterable[JobRow], *, now: datetime) -> dict[str, tuple[int | None, int | None]]:
    """Cost so far and forecast of each of these jobs, in whole cents, for a page that shows other things too."""
    rows = list(jobs)
    spans: dict[str, list[Span]] = {row.id: [] for row in rows}
    with db.read() as conn:
        for charge in costs.list_charges(conn, jobs=spans) if spans else ():
            spans[charge.job_id].extend(charge.spans)
    # Most jobs are over or cost nothing: their forecast is what they cost, and needs no look at their events.
    going = [row for row in rows if burn(spans[row.id]) > 0]
    left = eta.list_left(db, going, now=now)
    by_job: dict[str, tuple[int | None, int | None]] = {}
    for row in rows:
        if is_unpriced(row, spans[row.id]):
            by_job[row.id] = (None, None)
            continue
        amount, per_hour = add_up(spans[row.id], now=now), burn(spans[row.id])
        seconds = left.get(row.id) if per_hour > 0 else 0.0
        by_job[row.id] = (cents(amount.cents), cents(forecast(amount, cents_per_hour=per_hour, left_s=seconds)))
    return by_job


def is_unpriced(row: JobRow, spans: Sequence[Span]) -> bool:
    """Whether the price 0 is only a default: this machine is not free, its price is unknown. No cap counts it."""
    stated = not targets.is_free(row.target) or row.spec.resources.price_per_hour is not None
    return not stated and bool(spans) and all(span.cents_per_hour == 0 for span in spans)


def _free_targets() -> list[str]:
    return [name for name in targets.names() if targets.is_free(name)]


def cents(value: float | None) -> int | None:
    """Whole cents, rounded once, here."""
    return None if value is None else round(value)


def _job(row: JobRow, spans: list[Span], amount: Amount, whole: Amount, left_s: float | None) -> JobSpending:
    per_hour, cap = burn(spans), row.spec.limits.max_cost
    return JobSpending(
        id=row.id,
        name=row.name,
        project=row.project,
        status=row.status,
        cents=None if is_unpriced(row, spans) else cents(amount.cents),
        known_cents=round(amount.known_cents),
        cents_per_hour=per_hour,
        left_s=left_s,
        forecast_cents=(
            None if is_unpriced(row, spans) else cents(forecast(whole, cents_per_hour=per_hour, left_s=left_s))
        ),
        max_cost_cents=cents(cap * 100 if cap is not None else None),
        submitted_by=row.submitted_by,
    )


def _project(
    name: str, jobs: Mapping[str, list[Span]], unpriced: Collection[str], now: datetime, window: Window | None
) -> ProjectSpending:
    amounts = {job_id: add_up(spans, now=now, window=window) for job_id, spans in jobs.items()}
    unknown = sum(
        amounts[job_id].unknown > 0 or (job_id in unpriced and all(span.cents_per_hour == 0 for span in spans))
        for job_id, spans in jobs.items()
    )
    whole = sum(amounts.values(), Amount())
    return ProjectSpending(
        project=name,
        jobs=len(jobs),
        unknown_jobs=unknown,
        cents=None if unknown else cents(whole.cents),
        known_cents=round(whole.known_cents),
        cents_per_hour=sum(burn(spans) for spans in jobs.values()),
    )


def _budget(row: costs.BudgetRow, spent: Amount) -> BudgetLine:
    share = spent.known_cents / row.cap_cents if row.cap_cents else None
    return BudgetLine(
        project=row.project,
        period=row.period,
        cap_cents=row.cap_cents,
        spent_cents=round(spent.known_cents),
        share=share,
    )
