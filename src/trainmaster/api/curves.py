"""Curves of a job over steps or time, downsampled to what a screen shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from trainmaster.api.run import Point

Axis = Literal["step", "time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSegment:
    """One stretch of an attempt in which steps only rise. `repeated_from`: from there on it was done again later."""

    attempt: int
    repeated_from: float | None  # on the axis; null: nothing of it was repeated
    curves: Mapping[str, tuple[Point, ...]]  # by metric; a null is a value that was not a number


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveMark:
    """An event on the axis: an attempt began, a checkpoint was saved."""

    kind: Literal["attempt", "checkpoint"]
    x: float
    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesPage:
    """Curves of the metrics that were asked for, within `low` and `high` of the axis.

    Each curve keeps the lowest and the highest value of every interval. While a long run is read for the first time it
    is a sample of its steps, and `sampled` is true: ask again.
    """

    axis: Axis
    unit: str  # of the axis: step, s
    origin: datetime | None  # where an axis of time begins: the first point; null: no time is known, or steps
    metrics: tuple[str, ...]  # every one that the job has
    low: float | None  # of all there is; null: no point yet
    high: float | None
    segments: tuple[CurveSegment, ...]
    marks: tuple[CurveMark, ...]
    sampled: bool
