"""The cost of each project: this month (UTC), in total, and per hour now."""

from __future__ import annotations

from datetime import UTC, datetime

from trainmaster.api.costs import Costs, ProjectCost
from trainmaster.core.money.cost import Amount, Span, burn, month_of
from trainmaster.pages.job_cost import cost
from trainmaster.store import costs
from trainmaster.store.database import Database

Page = Costs


def read(db: Database, *, project: str | None = None, now: datetime | None = None) -> Costs:
    """One project, or all."""
    now = now or datetime.now(UTC)
    with db.read() as conn:
        months, totals = costs.spent_by_project(conn, project=project, now=now, windows=[month_of(now), None])
        going: dict[str, list[Span]] = {name: [] for name in sorted(totals)}
        for charge in costs.list_charges(conn, project=project, closed=False):
            going[charge.project].extend(charge.spans)
    projects = tuple(
        ProjectCost(
            project=name,
            month=cost(months.get(name, Amount())),
            total=cost(totals[name]),
            cents_per_hour=burn(spans),
        )
        for name, spans in going.items()
    )
    return Costs(month=f"{now:%Y-%m}", projects=projects)
