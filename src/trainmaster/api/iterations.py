"""Records of a training: iterations with their phases, epochs, evaluations, and pre-flight checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.api.jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One phase of an iteration: traj_gen, training or evaluation."""

    kind: str
    config: Mapping[str, Any] | None
    started_at: datetime | None
    completed_at: datetime | None
    step_time: float | None
    step_config: Mapping[str, Any] | None = None  # config under the name that earlier programs read


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration with its phases and its number of epochs."""

    number: int
    config: Mapping[str, Any] | None
    started_at: datetime | None
    completed_at: datetime | None
    time_taken: float | None
    epochs: int
    steps: tuple[Step, ...]
    iteration_number: int | None = None  # number under the name that earlier programs read


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A job with its iterations."""

    job: Job
    iterations: tuple[Iteration, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One epoch of an iteration, as reported last."""

    id: int
    iteration_id: int
    number: int
    avg_loss: float | None
    model_path: str | None
    optimizer_path: str | None
    metrics: Mapping[str, Any] | None
    at: datetime | None
    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """One page of the epochs of an iteration."""

    job_id: str
    iteration: int
    total: int
    epochs: tuple[Epoch, ...]


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
    next: int | None = None  # cursor of the following page; None on an empty page


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord:
    """One check on one node of an attempt."""

    id: int
    attempt: str
    node: str
    check: str
    verdict: str
    took_s: float | None
    findings: Any
    at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    checks: tuple[CheckRecord, ...]
