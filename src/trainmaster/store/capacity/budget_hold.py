"""Projects whose budget is spent: their jobs that cost something wait in the queue until there is room in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from sqlalchemy import Connection

from trainmaster.core.money.cost import Amount, dollars
from trainmaster.store import costs
from trainmaster.store.capacity.queue import WaitingRow
from trainmaster.store.costs import BudgetRow


class MayCost(Protocol):
    """Whether an attempt on a target may cost something, with the price that its spec states."""

    def __call__(self, word: str, /, *, stated: float | None) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A budget of which nothing is left."""

    period: str  # total, month
    text: str  # which, and how much of how much

    @property
    def why(self) -> str:
        """Why a job waits."""
        ends = " or the month ends" if self.period == "month" else ""
        return f"{self.text}; it waits until the budget is raised{ends}"


def find_spent(conn: Connection, project: str, *, now: datetime) -> Spent | None:
    """The budget of a project that is spent; where both are, that in all, which no new month gives back."""
    return list_spent(conn, [project], now=now).get(project)


def list_spent(conn: Connection, projects: Collection[str], *, now: datetime) -> dict[str, Spent]:
    """Those of these projects whose budget is spent."""
    (one,) = projects if len(projects) == 1 else (None,)
    found: dict[str, Spent] = {}
    for budget in sorted(costs.list_budgets(conn, project=one), key=lambda row: row.period != "total"):
        if budget.project not in projects or budget.project in found:
            continue
        amount = costs.spent(conn, budget.project, now=now, window=budget.window(now))
        if amount.known_cents >= budget.cap_cents:
            text = f"{describe(budget, now)} is spent: {figures(amount, budget.cap_cents)}"
            found[budget.project] = Spent(period=budget.period, text=text)
    return found


def list_held(conn: Connection, rows: Iterable[WaitingRow], *, may_cost: MayCost, now: datetime) -> dict[str, str]:
    """By job: why it may not start, of jobs that wait. What is known to cost nothing may.

    `may_cost`: whether jobs on a target may cost something with what they state.
    """
    known: dict[tuple[str, float | None], bool] = {}
    paid = []
    for row in rows:
        asked = (row.target, row.request.price_per_hour)
        if asked not in known:
            known[asked] = may_cost(row.target, stated=row.request.price_per_hour)
        if known[asked]:
            paid.append(row)
    spent = list_spent(conn, {row.project for row in paid}, now=now) if paid else {}
    return {row.id: spent[row.project].why for row in paid if row.project in spent}


def describe(budget: BudgetRow, now: datetime) -> str:
    """A budget in its present period, for people."""
    return f"the budget of project {budget.project} ({budget.label(now)})"


def figures(amount: Amount, cap_cents: float) -> str:
    """How much of a cap is spent, for people."""
    more = f", and {amount.unknown} of unknown price" if amount.unknown else ""
    return f"{dollars(amount.known_cents)} of {dollars(cap_cents)}{more}"
