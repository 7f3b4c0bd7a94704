"""Budgets of projects, and the amount spent of each."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from trainmaster import targets
from trainmaster.api.codec import fill
from trainmaster.api.costs import Budget, Budgets, Cost
from trainmaster.pages.job_cost import cost
from trainmaster.pages.parts.usage import sum_up
from trainmaster.store import costs
from trainmaster.store.database import Database
from trainmaster.store.page_rows.kept_sums import Recall


def read(db: Database, *, project: str | None = None, now: datetime | None = None) -> Budgets:
    """The budgets of one project, or all."""
    now = now or datetime.now(UTC)
    with db.read() as conn:
        rows = costs.list_budgets(conn, project=project)
        windows = list(dict.fromkeys(row.window(now) for row in rows))
        charges = costs.list_charges(conn, project=project, closed=False) if rows else []
        free = [name for name in targets.names() if targets.is_free(name)]
        sums: list[list[costs.GroupSum]] = []
        if rows:
            recall = Recall(db, conn)
            sums = costs.sum_groups(conn, charges, project=project, free=free, now=now, windows=windows, recall=recall)
    by_window = dict(zip(windows, sums, strict=True))
    spent = {
        row.id: sum_up(group for group in by_window[row.window(now)] if group.project == row.project) for row in rows
    }
    return Budgets(budgets=tuple(_budget(row, cost(spent[row.id])) for row in rows))


def _budget(row: costs.BudgetRow, spent: Cost) -> Budget:
    period: Literal["total", "month"] = "month" if row.period == "month" else "total"
    return fill(Budget, row, period=period, spent=spent)
