"""Costs and budgets, in cents. A cost with an unpriced part is null, never 0."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from trainmaster.core.money.cost import Cents
from trainmaster.core.states import Status

Each = Literal["jobs", "projects"]  # the lines of an export
Bound = Literal["timeout_s", "max_cost"]  # the limit that a forecast is made of, where the pace of a job is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingLine:
    """What one project, person, target or month has cost. `unknown_parts`: attempts whose price nobody stated."""

    name: str | None  # a person: None is the command line on the home folder
    known_cents: Cents
    unknown_parts: int
    attempts: int
    share: float  # of the known cents of all lines
    gpu_hours: float = 0.0  # held: nodes × processes_per_node, from when they were placed until given back


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A cost. `cents` is null where a part has no known price; `known_cents` is the sum of the priced parts."""

    cents: Cents | None
    known_cents: Cents
    unknown_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """The cost of a job so far, its present rate, and the forecast at its end."""

    job_id: str
    total: Cost
    cents_per_hour: float
    left_s: float | None
    forecast_cents: Cents | None
    max_cost_cents: Cents | None  # of the whole run
    forecast_bound: Bound | None = None  # the forecast is at most so much; null: it is from the pace of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectCost:
    """The cost of a project: this month, in total, and per hour now."""

    project: str
    month: Cost
    total: Cost
    cents_per_hour: float
    month_gpu_hours: float = 0.0
    total_gpu_hours: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The cost of each project: this month (UTC) and in total. Of each person and target: this month."""

    month: str
    projects: tuple[ProjectCost, ...]
    people: tuple[SpendingLine, ...] = ()
    targets: tuple[SpendingLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The budget of a project, in total or per month, and the amount spent."""

    project: str
    period: Literal["total", "month"]
    cap_cents: int
    spent: Cost
    created_at: datetime
    warned_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    budgets: tuple[Budget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpending:
    """One job of the cost page; null: unknown. The forecast covers the whole job in any month."""

    id: str
    name: str
    project: str
    status: Status
    cents: Cents | None
    known_cents: Cents  # of the priced parts
    cents_per_hour: float  # now
    left_s: float | None
    forecast_cents: Cents | None
    max_cost_cents: Cents | None  # of the whole run
    submitted_by: str | None = None  # name of the token; None: the command line on the home folder
    forecast_bound: Bound | None = None  # the forecast is at most so much; null: it is from the pace of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectSpending:
    """One project of the cost page: the sum of its jobs."""

    project: str
    jobs: int
    unknown_jobs: int  # jobs with an unpriced part
    cents: Cents | None
    known_cents: Cents
    cents_per_hour: float
    gpu_hours: float = 0.0  # held: nodes × processes_per_node, from when they were placed until given back


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """A budget and the amount spent."""

    project: str
    period: str  # total, month
    cap_cents: int
    spent_cents: Cents
    share: float | None  # None: the cap is 0
    unknown_jobs: int = 0  # jobs with an unpriced part, which does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPage:
    """Jobs by cost, highest first, with the sums of projects and the budgets."""

    month: str | None  # as 2026-11; None: from the beginning
    project: str | None
    jobs: tuple[JobSpending, ...]
    more: int  # jobs that are not listed; the sums include them
    projects: tuple[ProjectSpending, ...]
    budgets: tuple[BudgetLine, ...]
    made_at: datetime
    people: tuple[SpendingLine, ...] = ()
    targets: tuple[SpendingLine, ...] = ()
    failed: Cost | None = None  # of jobs that failed, without those of `limited`; null: one job is shown
    cancelled: Cost | None = None  # of jobs that were cancelled
    limited: Cost | None = None  # of jobs that a budget or a time limit ended


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOutlook:
    """A budget with what is left, and where spending leads. `forecast_cents` is of the month's end; null: no month."""

    project: str
    period: str
    cap_cents: int
    spent_cents: Cents
    left_cents: Cents
    share: float | None
    forecast_cents: Cents | None
    reached_at: datetime | None  # by what runs now, until it ends; null: not in this period, or never
    unknown_parts: int = 0  # attempts whose price nobody stated, which do not count


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleMachine:
    """A rented machine that costs money and trains nothing."""

    name: str
    kind: str | None
    region: str | None
    target: str
    project: str
    job_id: str
    job_name: str
    why: str
    since: datetime
    cents_per_hour: float | None
    cents: Cents | None  # since then


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingJob:
    """A job that holds machines now."""

    id: str
    name: str
    project: str
    submitted_by: str | None  # name of the token; null: the command line on the home folder
    cents_per_hour: float | None  # null: unknown
    cents: Cents | None  # so far; null: unknown
    gpus: int = 1
    gpu_hours: float = 0.0  # of its present attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Costs of a month, or of all, by project, person and target; months; budgets with outlook; idle machines."""

    month: str | None
    project: str | None
    known_cents: Cents
    unknown_parts: int
    cents_per_hour: float  # now, as far as prices are known
    unknown_going: int  # attempts that hold machines now whose price nobody stated
    forecast_cents: Cents | None  # at the end of the present month, as far as prices are known; null: no price is
    failed: Cost  # of jobs that failed, with all of their attempts
    limited: Cost  # of jobs that a budget or a time limit ended
    cancelled: Cost
    projects: tuple[SpendingLine, ...]
    people: tuple[SpendingLine, ...]
    targets: tuple[SpendingLine, ...]
    months: tuple[SpendingLine, ...]
    budgets: tuple[BudgetOutlook, ...]
    idle: tuple[IdleMachine, ...]
    going: tuple[GoingJob, ...]  # the dearest an hour first
    going_total: int
    made_at: datetime
    gpu_hours: float = 0.0
    bounded_jobs: int = 0  # in the forecast as long as their limits or the month allow: nothing says how long they need
