"""Shapes of sets of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.core.states import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a set. Without a job it waits for its turn, or has a message. Figures: of its last STEP event."""

    number: int
    values: Mapping[str, Any]  # of the matrix
    job: str | None
    name: str
    status: Status | None  # None: it has not begun, or its job was deleted
    step: int | None = None
    loss: float | None = None
    cost_cents: int | None = None
    best: bool = False  # lowest loss of the trials that are completed
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLine:
    """A set in the list: one status, one cost."""

    id: str
    name: str
    project: str
    status: Status
    trials: int
    counts: Mapping[str, int]  # of its trials by status; without a job `waiting`, `skipped` by a cancel, or `deleted`
    parallel: int
    message: str  # why its next trial does not begin
    cost_cents: int | None  # of all its jobs; None: that of one is unknown
    best_loss: float | None
    created_at: datetime
    submitted_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPage:
    """A set with its table of results."""

    set: SetLine
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetsPage:
    """Sets, newest first."""

    sets: tuple[SetLine, ...]
