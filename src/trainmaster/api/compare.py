"""Runs side by side: how their specs differ, their final values, and curves of one metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from trainmaster.core.money.cost import Cents
from trainmaster.core.states import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDifference:
    """A field in which the specs differ: each value as text, and the runs that have it. A field not stated is "–"."""

    field: str
    values: tuple[tuple[str, tuple[str, ...]], ...]  # value, ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of a comparison. Figures are those of its last STEP and its last evaluation; null before the first."""

    id: str
    name: str
    project: str
    target: str
    submitted_by: str | None
    status: Status
    created_at: datetime
    duration_s: float | None
    step: int | None
    values: Mapping[str, float]  # of the last STEP, and `eval/…` of the last evaluation
    texts: Mapping[str, str]  # of these the ones that are no number: NaN, Infinity, -Infinity
    cost_cents: Cents | None
    fields: Mapping[str, str]  # of the spec, those that differ
    group: str | None  # value of the field by which runs are grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """Runs with one value of a field, and the final values of a metric over them."""

    value: str
    runs: int
    lowest: float | None
    mean: float | None
    highest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Up to 200 runs, in the order in which they were chosen."""

    runs: tuple[ComparedRun, ...]
    missing: int  # chosen, and not there or of another project
    differences: tuple[SpecDifference, ...]  # of a command argument by argument: `command --lr`
    whole: tuple[SpecDifference, ...]  # these commands in full
    same: int  # fields that all specs have alike
    metrics: tuple[str, ...]  # that can be drawn
    metric: str
    group: str | None
    groups: tuple[RunGroup, ...]
    made_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurve:
    """Points of one metric of one run: step, seconds since its first point, value. Evenly spread over its events."""

    id: str
    points: tuple[tuple[float, float | None, float | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A job that can be chosen for a comparison."""

    id: str
    name: str
    project: str
    status: Status
    created_at: datetime
