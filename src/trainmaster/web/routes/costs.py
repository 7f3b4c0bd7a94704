"""Money: what jobs and projects cost, and what a project may spend. All in cents."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from trainmaster.core.cost import Amount, Span, add_up, burn, forecast, month_of
from trainmaster.pages import cost
from trainmaster.pages.cost import CostPage
from trainmaster.store import Database, audit, costs, eta
from trainmaster.store.costs import BudgetRow
from trainmaster.store.tokens import Role
from trainmaster.web import answers, dependencies
from trainmaster.web.auth import need
from trainmaster.web.errors import Refused
from trainmaster.web.routes import TRAINING, group, reply

router = group("money")
ProjectName = Annotated[str, Path(pattern=dependencies.NAME, description="the project")]
Period = Annotated[Literal["total", "month"], Path(description="in all, or each calendar month (UTC)")]

Month = Annotated[
    str | None, Query(pattern=r"^20[0-9][0-9]-(0[1-9]|1[0-2])$", description="a calendar month in UTC, as 2026-11")
]


class Cap(BaseModel):
    """What a project may spend."""

    model_config = ConfigDict(extra="forbid")
    cap_cents: int = Field(strict=True, ge=0, le=10**15)


@router.get(f"{TRAINING}/jobs/{{uuid}}/cost", response_model=answers.JobCost)
def find_job_cost(job: dependencies.Job, db: dependencies.Db) -> Response:
    """What a job has cost so far, and will have cost at its end at its present pace."""
    now = datetime.now(UTC)
    with db.read() as conn:
        spans = [span for charge in costs.list_charges(conn, jobs=[job.id]) for span in charge.spans]
    amount, per_hour = add_up(spans, now=now), burn(spans)
    left = eta.list_left(db, [job], now=now).get(job.id)
    ahead = forecast(amount, cents_per_hour=per_hour, left_s=left)
    cap = job.spec.limits.max_cost
    return reply(
        answers.JobCost(
            job_id=job.id, total=_cost(amount), cents_per_hour=per_hour, left_s=left,
            forecast_cents=_whole(ahead),
            max_cost_cents=_whole(None if cap is None else cap * 100),
        )
    )  # fmt: skip


@router.get("/v1/cost", response_model=answers.Costs)
def list_costs(db: dependencies.Db, project: dependencies.Project) -> Response:
    """What each project has cost this month and in all, and what it costs now."""
    now = datetime.now(UTC)
    with db.read() as conn:
        months = costs.spent_by_project(conn, project=project, now=now, window=month_of(now))
        totals = costs.spent_by_project(conn, project=project, now=now)
        going: dict[str, list[Span]] = {name: [] for name in sorted(totals)}
        for charge in costs.list_charges(conn, project=project, closed=False):
            going[charge.project].extend(charge.spans)
    projects = tuple(
        answers.ProjectCost(
            project=name,
            month=_cost(months.get(name, Amount())),
            total=_cost(totals[name]),
            cents_per_hour=burn(spans),
        )
        for name, spans in going.items()
    )
    return reply(answers.Costs(month=f"{now:%Y-%m}", projects=projects))


@router.get("/v1/cost/jobs", response_model=CostPage)
def list_job_costs(
    db: dependencies.Db, project: dependencies.Project, month: Month = None, limit: dependencies.Limit = 50
) -> Response:
    """Jobs by what they cost, most first, with sums of projects: in a month, or without one from the beginning."""
    when = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC) if month is not None else None
    return reply(cost.read(db, project=project, month=when, limit=limit))


@router.get("/v1/budgets", response_model=answers.Budgets)
def list_budgets(db: dependencies.Db, project: dependencies.Project) -> Response:
    """What projects may spend, and what they have."""
    with db.read() as conn:
        rows = costs.list_budgets(conn, project=project)
    return reply(answers.Budgets(budgets=tuple(_budget(db, row) for row in rows)))


@router.put("/v1/budgets/{project}/{period}", response_model=answers.Budget)
def set_budget(
    project: ProjectName, period: Period, cap: Cap, db: dependencies.Db, who: dependencies.Admin
) -> Response:
    """Set what a project may spend. Jobs that are over it are asked to save and stop."""
    need(who, Role.ADMIN, project=project)
    with db.write() as conn:
        costs.set_budget(conn, project, period, cap.cap_cents, at=datetime.now(UTC))
        subject, detail = f"budget:{project}/{period}", {"cap_cents": cap.cap_cents}
        audit.record(conn, who=who.name, action="budget.set", subject=subject, detail=detail)
        row = next(row for row in costs.list_budgets(conn, project=project) if row.period == period)
    return reply(_budget(db, row))


@router.delete("/v1/budgets/{project}/{period}", status_code=204, response_class=Response)
def remove_budget(project: ProjectName, period: Period, db: dependencies.Db, who: dependencies.Admin) -> Response:
    """Let a project spend what it likes. 404 if it did already."""
    need(who, Role.ADMIN, project=project)
    with db.write() as conn:
        found = costs.remove_budget(conn, project, period)
        if found:
            audit.record(conn, who=who.name, action="budget.remove", subject=f"budget:{project}/{period}")
    if not found:
        raise Refused(404, "not_found", f"the project {project} has no such budget")
    return Response(status_code=204)


def _budget(db: Database, row: BudgetRow) -> answers.Budget:
    now = datetime.now(UTC)
    with db.read() as conn:
        amount = costs.spent(conn, row.project, now=now, window=row.window(now))
    period: Literal["total", "month"] = "month" if row.period == "month" else "total"
    return answers.Budget(
        project=row.project, period=period, cap_cents=row.cap_cents, spent=_cost(amount), created_at=row.created_at,
        warned_at=row.warned_at,
    )  # fmt: skip


def _cost(amount: Amount) -> answers.Cost:
    known = round(amount.known_cents)
    return answers.Cost(cents=_whole(amount.cents), known_cents=known, unknown_parts=amount.unknown)


def _whole(cents: float | None) -> int | None:
    return None if cents is None else round(cents)
