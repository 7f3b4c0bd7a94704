"""Shapes of sets of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.core.money.cost import Cents
from trainmaster.core.states import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a set. Without a job it waits for its turn, or has a message. Figures: of its last STEP event.

    `value` is its figure in the metric of the set: of a matrix the loss, of a search what the sampler was told.
    """

    number: int
    values: Mapping[str, Any]  # of the matrix, or as they were proposed
    job: str | None
    name: str
    status: Status | None  # None: it has not begun, or its job was deleted
    step: int | None = None
    loss: float | None = None
    cost_cents: Cents | None = None
    best: bool = False  # best value of the trials that are completed
    message: str = ""
    value: float | None = None
    pruned: bool = False  # stopped early, because others were better by then
    loss_text: str | None = None  # NaN, Infinity or -Infinity, where its last loss is no number


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLine:
    """A set in the list: one status, one cost."""

    id: str
    name: str
    project: str
    status: Status
    trials: int
    # Of its trials by status; `pruned`; without a job `waiting`, `skipped` by a cancel, or `deleted`.
    counts: Mapping[str, int]
    parallel: int
    message: str  # why its next trial does not begin
    cost_cents: Cents | None  # of all its jobs; None: that of one is unknown
    best_loss: float | None
    created_at: datetime
    submitted_by: str | None
    metric: str = "loss"
    goal: str = "min"  # or max
    best_value: float | None = None  # in the metric
    search: str | None = None  # how trials are proposed and stopped; None: a matrix
    schedule: str | None = None  # cron line and time zone; the trials are those of the newest times
    next_at: datetime | None = None  # of the schedule
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPage:
    """A set with its table of results; of a search, the trials that were proposed."""

    set: SetLine
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedSet(SetPage):
    """A set that was submitted. `new`: False where the same key had created it before.

    The API sends `new` as its status code: 201 or 200.
    """

    new: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SetsPage:
    """Sets, newest first."""

    sets: tuple[SetLine, ...]
