"""What the store returns: one frozen dataclass per kind of row. Times are aware and UTC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.core.plan import ExitRecord
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Report, Stage, Status


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One try of a job. Committed before anything is started for it."""

    id: str
    job_id: str
    number: int
    handle: Mapping[str, Any] | None
    report: Report | None  # the last thing the target said that was not `unknown`
    reason: Reason | None
    message: str
    exit: ExitRecord | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """How far a stream of an attempt has been read and kept."""

    attempt: str
    stream: str
    offset: int
    inside: bool  # the offset lies inside a line too long to be kept whole


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """One line of an event stream. `phase` None is a line that is not an event; its text is kept."""

    attempt: str
    stream: str
    offset: int
    length: int
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
        """What `list_events(after=…)` takes to go on behind this row: (attempt number, offset)."""
        return int(self.attempt.rpartition(".")[2]), self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionRow:
    """One move of a job."""

    job_id: str
    at: datetime
    stage_from: Stage | None  # None: the job was made
    stage_to: Stage | None  # None: the job is final
    status: Status
    reason: Reason | None
    message: str
