"""What the store returns: one frozen dataclass per kind of row. Times are aware and UTC."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from trainmaster.core.errors import JobUnreadable
from trainmaster.core.plan import ExitRecord
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Stage, Status, TargetState

R = TypeVar("R")
T = TypeVar("T")
_NAMED: set[str] = set()  # jobs that the log has named
log = logging.getLogger(__name__)


def read_each(read: Callable[[R], T], rows: Iterable[R]) -> list[T]:
    """Rows of many jobs. One that cannot be read is left out and logged once: it must not keep the others away."""
    found: list[T] = []
    for row in rows:
        try:
            found.append(read(row))
        except JobUnreadable as error:
            log_once(error)
    return found


def log_once(error: JobUnreadable) -> None:
    """Name a job that cannot be read in the log, and not again at the next tick."""
    if error.job_id not in _NAMED:
        _NAMED.add(error.job_id)
        log.error("%s", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job, and where it is."""

    id: str
    name: str
    project: str
    target: str
    status: Status
    stage: Stage | None  # None when final
    reason: Reason | None  # why it ended; while it is not final, why its last attempt did
    message: str
    spec: JobSpec
    attempts: int  # made so far
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    project_started_at: datetime | None = None  # what its PROJECT start event says
    time_taken: float | None = None  # seconds, from PROJECT end
    training_config: Mapping[str, Any] | None = None  # from GROUP_ITERATION start
    heard_at: datetime | None = None  # when the last new event was taken in
    stalled_at: datetime | None = None
    rest_until: datetime | None = None  # left alone until then
    tries: int = 0  # of the present stage that failed in a row
    stage_since: datetime | None = None
    cancel_at: datetime | None = None  # when it was asked to stop
    submitted_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One try of a job. Committed before anything is started for it."""

    id: str
    job_id: str
    number: int
    handle: Mapping[str, Any] | None
    report: TargetState | None  # the last thing the target said that was not `unknown`
    reason: Reason | None
    message: str
    exit: ExitRecord | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    price_cents_per_hour: float | None = None
    released_at: datetime | None = None
    stop_reason: Reason | None = None  # why the control plane wants it to stop
    stop_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """How far a stream of an attempt has been read and kept."""

    attempt: str
    stream: str
    offset: int
    inside: bool  # the offset lies inside a line too long to be kept whole
    heard_at: datetime | None = None  # when it last grew
    base: int = 0  # offset at which the present file begins: more than 0 after it was truncated or replaced
    tail: bytes | None = None  # last bytes of the file before `offset`, to recognise it again
    kept: int = 0  # bytes that its lines take in the database, about


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRow:
    """One iteration of a job. A run that names none has one, number 1."""

    id: int
    job_id: str
    number: int
    config: Mapping[str, Any] | None
    started_at: datetime | None
    completed_at: datetime | None
    time_taken: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One part of an iteration: traj_gen, training or evaluation."""

    id: int
    iteration_id: int
    kind: str
    config: Mapping[str, Any] | None
    started_at: datetime | None
    completed_at: datetime | None
    step_time: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRow:
    """One evaluation of one model."""

    id: int
    job_id: str
    iteration_id: int
    model_id: str | None
    metrics: Mapping[str, Any] | None
    at: datetime | None
    attempt: str
    stream: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRow:
    """Something of a job that is kept in storage."""

    id: int
    job_id: str
    attempt: str | None
    kind: str
    path: str
    size_bytes: int
    sha256: str
    stored_at: datetime
