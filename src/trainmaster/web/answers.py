"""What the API answers, where no page says it already: the shapes that stand in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from trainmaster.control.logs import LogStream
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.store.audit import AuditRow
from trainmaster.store.nodes import NodeRow
from trainmaster.store.rows import ArtifactRow, AttemptRow, CheckRow, EpochRow, EventRow, InstanceRow, JobRow
from trainmaster.store.tokens import Role, TokenRow
from trainmaster.store.webhooks import WebhookRow


class FaultShape(BaseModel):
    """One mistake in what was sent: where it is and what is wrong."""

    path: str
    message: str


class ErrorShape(BaseModel):
    """What went wrong. `code` is for programs and stays; `message` is for people and may change."""

    code: str
    message: str
    faults: list[FaultShape] = []


class Error(BaseModel):
    """Every answer that is not a success."""

    error: ErrorShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    message: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether this server serves, and whether it drives jobs."""

    status: Literal["ok", "failing"]
    version: str
    reconciler: Literal["off", "starting", "running", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Whether work can be given to this server, and why not."""

    ready: bool
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as its row says; its page (`GET /v1/training/jobs/{uuid}`) says what came of it too."""

    id: str
    name: str
    project: str
    target: str
    status: Status
    stage: Stage | None
    reason: Reason | None
    message: str
    attempts: int
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    project_started_at: datetime | None
    time_taken: float | None
    training_config: Mapping[str, Any] | None
    heard_at: datetime | None
    stalled_at: datetime | None
    submitted_by: str | None
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One part of an iteration: traj_gen, training or evaluation."""

    kind: str
    config: Mapping[str, Any] | None
    started_at: datetime | None
    completed_at: datetime | None
    step_time: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration with its steps, and how many epochs it has."""

    number: int
    config: Mapping[str, Any] | None
    started_at: datetime | None
    completed_at: datetime | None
    time_taken: float | None
    epochs: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A job with its iterations."""

    job: Job
    iterations: tuple[Iteration, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """The epochs of one iteration, a page at a time."""

    job_id: str
    iteration: int
    total: int
    epochs: tuple[EpochRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of one model."""

    id: int
    job_id: str
    iteration: int
    model_id: str | None
    metrics: Mapping[str, Any] | None
    at: datetime | None
    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    evaluations: tuple[Evaluation, ...]
    limit: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events in their order; `next` goes on behind them."""

    events: tuple[EventRow, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    attempts: tuple[AttemptShape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptShape:
    """One try of a job. What its target needs to find it again is nobody else's business."""

    id: str
    number: int
    report: str | None
    reason: Reason | None
    message: str
    exit_codes: Mapping[str, int] | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    released_at: datetime | None
    price_cents_per_hour: float | None
    stop_reason: Reason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    checks: tuple[CheckRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Every stream that can be read, by attempt."""

    streams: tuple[LogStream, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Something of a job that is kept in storage; `url` is where to fetch it."""

    path: str
    kind: str
    attempt: str | None
    size_bytes: int
    sha256: str
    stored_at: datetime
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    nodes: tuple[NodeRow, ...]
    limit: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    instances: tuple[InstanceRow, ...]
    limit: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    tokens: tuple[TokenRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token that was just made. `token` is shown this once and cannot be had again."""

    name: str
    role: Role
    project: str | None
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Me:
    """Who the server takes the caller for."""

    name: str
    role: Role
    project: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    entries: tuple[AuditRow, ...]
    limit: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What something has cost. `cents` is null where a part of it has no known price: never 0 for want of knowledge."""

    cents: int | None
    known_cents: int
    unknown_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """What a job has cost, what it costs now, and what it will have cost at its end if it goes on like this."""

    job_id: str
    total: Cost
    cents_per_hour: float
    left_s: float | None
    forecast_cents: int | None
    max_cost_cents: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectCost:
    project: str
    month: Cost
    total: Cost
    cents_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What each project has cost: this month (UTC) and in all."""

    month: str
    projects: tuple[ProjectCost, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a project may spend in all or each month, and what it has."""

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
class Webhooks:
    webhooks: tuple[WebhookRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWebhook:
    """A webhook that was just made. `signing_key` is shown this once."""

    id: str
    project: str | None
    url: str
    topics: tuple[str, ...]
    created_at: datetime
    enabled: bool
    signing_key: str


def attempt(row: AttemptRow) -> AttemptShape:
    return AttemptShape(
        id=row.id, number=row.number, report=row.report, reason=row.reason, message=row.message,
        exit_codes=row.exit.exit_codes if row.exit is not None else None, created_at=row.created_at,
        started_at=row.started_at, ended_at=row.ended_at, released_at=row.released_at,
        price_cents_per_hour=row.price_cents_per_hour, stop_reason=row.stop_reason,
    )  # fmt: skip


def artifact(row: ArtifactRow, url: str) -> Artifact:
    return Artifact(
        path=row.path, kind=row.kind, attempt=row.attempt, size_bytes=row.size_bytes, sha256=row.sha256,
        stored_at=row.stored_at, url=url,
    )  # fmt: skip


def job(row: JobRow, spec: Mapping[str, Any]) -> Job:
    names = Job.__dataclass_fields__.keys() - {"spec"}
    return Job(**{name: getattr(row, name) for name in names}, spec=spec)
