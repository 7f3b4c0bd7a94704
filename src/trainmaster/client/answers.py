"""What a server answers, as frozen dataclasses. Words of the server (status, stage, reason) stay text: a newer server
may know more of them, and fields that are not known here are passed over."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

T = TypeVar("T")
FINAL = frozenset({"completed", "failed", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """A job in a list. Figures are those of its last step; None before the first."""

    id: str
    name: str
    project: str
    target: str
    status: str
    stage: str | None
    reason: str | None
    message: str
    attempts: int
    step: int | None
    steps: int | None
    progress: float | None
    loss: float | None
    tokens_per_s: float | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """A page of the list; `total` is how many fit on all pages."""

    jobs: tuple[JobLine, ...]
    total: int
    counts: Mapping[str, int]
    limit: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job as its row says. `new` is False where the key had been used for the same submission before."""

    id: str
    name: str
    project: str
    target: str
    status: str
    stage: str | None
    reason: str | None
    message: str
    attempts: int
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    time_taken: float | None
    submitted_by: str | None
    spec: Mapping[str, Any]
    new: bool = True

    @property
    def final(self) -> bool:
        return self.status in FINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    overall: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Points (step, value); None is a value that was not a number."""

    loss: tuple[tuple[float, float | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The figures of a job so far. None is "not said"."""

    events: int
    step: int | None
    steps: int | None
    progress: float | None
    loss_first: float | None
    loss_last: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    left_s: float | None
    mfu: float | None
    ranks: int | None
    device: str | None
    device_name: str | None
    resumed_from: int | None
    garbage_lines: int
    preflight: Preflight | None
    curves: Curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try of a job and how it ended, with the evidence it left."""

    number: int
    report: str | None
    ok: bool | None
    reason: str | None
    action: str | None
    message: str
    resumable: bool
    exit_codes: Mapping[str, int]
    evidence: Mapping[str, Any]
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything the page of a job says."""

    id: str
    name: str
    project: str
    target: str
    status: str
    stage: str | None
    reason: str | None
    message: str
    action: str | None
    cancel_requested: bool
    created_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    duration_s: float | None
    attempts: tuple[Attempt, ...]
    run: Run
    spec: Mapping[str, Any] | None

    @property
    def final(self) -> bool:
        return self.status in FINAL


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
    number: int
    config: Mapping[str, Any] | None
    started_at: datetime | None
    completed_at: datetime | None
    time_taken: float | None
    epochs: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A job with its iterations and their steps."""

    job: Submitted
    iterations: tuple[Iteration, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    number: int
    avg_loss: float | None
    model_path: str | None
    optimizer_path: str | None
    metrics: Mapping[str, Any] | None
    at: datetime | None
    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    id: int
    job_id: str
    iteration: int
    model_id: str | None
    metrics: Mapping[str, Any] | None
    at: datetime | None
    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the event file. `phase` None is a line that is not an event; its text is kept."""

    attempt: str
    stream: str
    offset: int
    ts: datetime | None
    seq: int | None
    phase: str | None
    event: str | None
    iteration: int | None
    epoch: int | None
    data: Mapping[str, Any]
    extra: Mapping[str, Any]
    fault: str | None
    text: str | None

    @property
    def cursor(self) -> tuple[int, int]:
        """Its place among the job's events: (attempt number, byte offset)."""
        return int(self.attempt.rpartition(".")[2]), self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStream:
    attempt: int
    stream: str
    size_bytes: int
    stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Something of a job that is kept in storage."""

    path: str
    kind: str
    attempt: str | None
    size_bytes: int
    sha256: str
    stored_at: datetime
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    attempt: str
    node: str
    check: str
    verdict: str
    took_s: float | None
    findings: Any
    at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """`cents` is None where a part of it has no known price."""

    cents: int | None
    known_cents: int
    unknown_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
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
class JobSpent:
    """What one job has cost, and will have cost at its end."""

    id: str
    name: str
    project: str
    status: str
    cents: int | None
    known_cents: int
    cents_per_hour: float
    left_s: float | None
    forecast_cents: int | None
    max_cost_cents: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectSpent:
    project: str
    jobs: int
    unknown_jobs: int
    cents: int | None
    known_cents: int
    cents_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpent:
    project: str
    period: str
    cap_cents: int
    spent_cents: int
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Jobs by what they cost, most first; projects and budgets whole."""

    month: str | None
    project: str | None
    jobs: tuple[JobSpent, ...]
    more: int
    projects: tuple[ProjectSpent, ...]
    budgets: tuple[BudgetSpent, ...]
    made_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    project: str
    period: str
    cap_cents: int
    spent: Cost
    created_at: datetime
    warned_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token without what would let anybody use it."""

    name: str
    role: str
    project: str | None
    created_at: datetime
    used_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    status: str
    version: str
    reconciler: str


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def decode(kind: type[T], value: Any) -> T:
    """A dataclass from what JSON gave. A field that is missing and has no default is an error (TypeError)."""
    decoded: T = _decode(kind, value)
    return decoded


def _decode(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if value is None or kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _decode(next(part for part in typing.get_args(kind) if part is not types.NoneType), value)
    if origin is tuple:
        parts = typing.get_args(kind)
        each = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_decode(part, item) for part, item in zip(each, value, strict=False))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{name: _decode(hints[name], item) for name, item in value.items() if name in hints})
    if kind is datetime:
        return datetime.fromisoformat(value)
    if kind is float and isinstance(value, int):
        return float(value)
    return value
