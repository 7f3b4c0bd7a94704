"""Budgets of projects, and the amount spent of each."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from trainmaster.api.costs import Budget, Budgets, Cost
from trainmaster.pages.job_cost import cost
from trainmaster.store import costs
from trainmaster.store.database import Database

Page = Budgets


def read(db: Database, *, project: str | None = None, now: datetime | None = None) -> Budgets:
    """The budgets of one project, or all."""
    now = now or datetime.now(UTC)
    with db.read() as conn:
        rows = costs.list_budgets(conn, project=project)
        spent = costs.spent_of_budgets(conn, rows, now=now)
    return Budgets(budgets=tuple(_budget(row, cost(spent[row.id])) for row in rows))


def _budget(row: costs.BudgetRow, spent: Cost) -> Budget:
    period: Literal["total", "month"] = "month" if row.period == "month" else "total"
    return Budget(
        project=row.project,
        period=period,
        cap_cents=row.cap_cents,
        spent=spent,
        created_at=row.created_at,
        warned_at=row.warned_at,
    )
