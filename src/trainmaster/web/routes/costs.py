"""Costs of jobs and projects, and budgets of projects. All in cents."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Path, Query
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from trainmaster.api.costs import Budget, Budgets, CostPage, Costs, Each, JobCost
from trainmaster.pages import budgets, cost, job_cost, project_costs
from trainmaster.pages.parts import cost_csv
from trainmaster.store import audit, costs
from trainmaster.web import dependencies
from trainmaster.web.auth import Caller
from trainmaster.web.errors import Refused, not_found
from trainmaster.web.routes import TRAINING, Body, group, reply

router = group("money")
Period = Annotated[Literal["total", "month"], Path(description="total, or each calendar month (UTC)")]

Month = Annotated[
    str | None, Query(pattern=r"^20[0-9][0-9]-(0[1-9]|1[0-2])$", description="calendar month in UTC, such as 2026-11")
]

EachLine = Annotated[Each, Query(description="a line for each job, or sums of projects")]


class Cap(Body):
    """The budget of a project."""

    cap_cents: int = Field(strict=True, ge=0, le=10**15)


@router.get(f"{TRAINING}/jobs/{{uuid}}/cost", response_model=JobCost)
def find_job_cost(job: dependencies.Job, db: dependencies.Db) -> Response:
    """The cost of a job so far, and the forecast at its end."""
    page = job_cost.read(db, job.id)
    if page is None:
        raise not_found(job.id)
    return reply(page)


@router.get("/v1/cost", response_model=Costs)
def list_costs(db: dependencies.Db, project: dependencies.Project) -> Response:
    """The cost of each project: this month, in total, and per hour now."""
    return reply(project_costs.read(db, project=project))


@router.get("/v1/cost/jobs", response_model=CostPage)
def list_job_costs(
    db: dependencies.Db, project: dependencies.Project, month: Month = None, limit: dependencies.Limit = 50
) -> Response:
    """Jobs by cost, highest first, with the sums of projects; in a month, or from the beginning."""
    return reply(cost.read(db, project=project, month=parse_month(month), limit=limit))


@router.get(
    "/v1/cost.csv",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
def download_costs(
    db: dependencies.Db, project: dependencies.Project, month: Month = None, each: EachLine = "jobs"
) -> Response:
    """All jobs with what they cost, or projects by person, target and status, as CSV; in a month, or in all."""
    pieces = cost_csv.read(db, each=each, project=project, month=parse_month(month))
    name = f"cost-{each}-{month or 'all'}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces, media_type="text/csv", headers=headers)


def parse_month(month: str | None) -> datetime | None:
    """When a month begins."""
    return datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC) if month is not None else None


def need_budgets(who: Caller) -> None:
    """Refuse to set what holds the caller: an admin of a project has no say in its budget."""
    if not who.runs_server:
        raise Refused(403, "forbidden", "budgets are set, raised and removed by an administrator of the server")


@router.get("/v1/budgets", response_model=Budgets)
def list_budgets(db: dependencies.Db, project: dependencies.Project) -> Response:
    """Budgets of projects, and the amounts spent."""
    return reply(budgets.read(db, project=project))


@router.put("/v1/budgets/{project}/{period}", response_model=Budget)
def set_budget(
    project: dependencies.ProjectName, period: Period, cap: Cap, db: dependencies.Db, who: dependencies.User
) -> Response:
    """Set the budget of a project, as an admin of the server. Jobs over budget are stopped after they have saved."""
    need_budgets(who)
    with db.write() as conn:
        costs.set_budget(conn, project, period, cap.cap_cents, at=datetime.now(UTC))
        subject, detail = f"budget:{project}/{period}", {"cap_cents": cap.cap_cents}
        audit.record(conn, who=who.name, action="budget.set", subject=subject, detail=detail)
    return reply(next(budget for budget in budgets.read(db, project=project).budgets if budget.period == period))


@router.delete("/v1/budgets/{project}/{period}", status_code=204, response_class=Response)
def remove_budget(
    project: dependencies.ProjectName, period: Period, db: dependencies.Db, who: dependencies.User
) -> Response:
    """Remove a budget, as an admin of the server. 404 if there is none."""
    need_budgets(who)
    with db.write() as conn:
        removed = costs.remove_budget(conn, project, period)
        if removed:
            audit.record(conn, who=who.name, action="budget.remove", subject=f"budget:{project}/{period}")
    if not removed:
        raise Refused(404, "not_found", f"project {project} has no such budget")
    return Response(status_code=204)
