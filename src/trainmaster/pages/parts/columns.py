"""Metrics of a run as columns of plain numbers, from which any window is downsampled in a few milliseconds."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trainmaster.api.curves import Axis, CurveMark, CurveSegment, CurvesPage
from trainmaster.api.run import Point
from trainmaster.pages.parts.downsample import number, whole
from trainmaster.store.page_rows.figures import Figures

_MOST_METRICS = 64
_NAME_LENGTH = 100
_MOST_MARKS = 1000  # of one kind in an answer
_SICK = math.inf  # a value that was written and is not a number; NaN: none was written
_NONE = math.nan


@dataclass(slots=True)
class Segment:
    """Rows of one attempt in which the step only rises."""

    attempt: int
    steps: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))  # seconds since 1970
    values: dict[str, array[float]] = field(default_factory=dict)

    def add(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        rows = len(self.steps)
        self.steps.append(step)
        self.times.append(time)
        for name in figures.keys() - self.values.keys():
            self.values[name] = array("f", [_NONE]) * rows
        for name, column in self.values.items():
            column.append(figures.get(name, _NONE))

    def size(self) -> int:
        return len(self.steps) * (16 + 4 * len(self.values))


class Columns:
    """All rows of a job so far. `cursor` is where the next read goes on."""

    def __init__(self) -> None:
        self.cursor: tuple[int, int] | None = None
        self.metrics: dict[str, None] = {}
        self._steps: list[Segment] = []
        self._evals: list[Segment] = []
        self._saved: list[tuple[int, int, float]] = []  # attempt, step, time

    def size(self) -> int:
        """Bytes that it holds, about."""
        return sum(segment.size() for segment in (*self._steps, *self._evals)) + 64 * len(self._saved)

    def add(self, row: Figures) -> None:
        self.cursor = row.cursor
        step = whole(row.data, "step")
        if step is None:
            return
        attempt = row.cursor[0]
        time = row.ts.timestamp() if row.ts is not None else _NONE
        if row.phase == "STEP" and row.event == "metrics":
            self._append(self._steps, attempt, step, time, self._figures(row.data, ""))
        elif row.phase == "EVAL_MODEL" and row.event == "metrics":
            self._append(self._evals, attempt, step, time, self._figures(row.data, "eval_"))
        elif row.phase == "CHECKPOINT" and row.event == "saved":
            self._saved.append((attempt, step, time))

    def _figures(self, data: Mapping[str, Any], prefix: str) -> dict[str, float]:
        figures: dict[str, float] = {}
        for key, value in data.items():
            if key == "step" or value is None or isinstance(value, bool | dict | list):
                continue
            finite = number(data, key)
            if finite is None and not (isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity")):
                continue  # text
            name = prefix + key[:_NAME_LENGTH]
            if name not in self.metrics:
                if len(self.metrics) >= _MOST_METRICS:
                    continue
                self.metrics[name] = None
            figures[name] = finite if finite is not None and abs(finite) < 3e38 else _SICK
        return figures

    def _append(
        self, segments: list[Segment], attempt: int, step: int, time: float, figures: Mapping[str, float]
    ) -> None:
        last = segments[-1] if segments else None
        if last is None or last.attempt != attempt or step < last.steps[-1]:
            segments.append(last := Segment(attempt=attempt))
        if time != time:  # noqa: PLR0124 (NaN): a row without a time stands where the one before it does
            time = last.times[-1] if last.times else segments[-2].times[-1] if len(segments) > 1 else 0.0
        last.add(step, max(time, last.times[-1]) if last.times else time, figures)

    def window(
        self, names: list[str], *, axis: Axis, low: float | None, high: float | None, points: int, sampled: bool
    ) -> CurvesPage:
        """The curves of these metrics between two places of the axis, of about so many points each."""
        every = [segment for segment in (*self._steps, *self._evals) if segment.steps]
        origin = min((segment.times[0] for segment in every), default=0.0) if axis == "time" else 0.0
        span = [(_axis(s, axis)[0] - origin, _axis(s, axis)[-1] - origin) for s in every]
        start, end = min((a for a, _ in span), default=None), max((b for _, b in span), default=None)
        repeated = _repeated(self._steps)
        segments = []
        for place, segment in enumerate((*self._steps, *self._evals)):
            cut = repeated[place] if place < len(repeated) else None
            xs = _axis(segment, axis)
            first = max(0, bisect_left(xs, low + origin) - 1) if low is not None else 0
            last = min(len(xs), bisect_right(xs, high + origin) + 1) if high is not None else len(xs)
            # Shared out by length, so that a run of many attempts costs as much as a run of one. Evaluations are few.
            share = max(8, points * (last - first) // max(1, sum(len(s.steps) for s in self._steps)))
            share = points if low is not None or high is not None or place >= len(repeated) else share
            curves = {
                name: tuple(_downsample(xs, segment.values[name], first=first, last=last, points=share, origin=origin))
                for name in names
                if name in segment.values and last > first
            }
            if curves:
                at = None if cut is None else xs[cut] - origin
                segments.append(CurveSegment(attempt=segment.attempt, repeated_from=at, curves=curves))
        return CurvesPage(
            axis=axis,
            unit="step" if axis == "step" else "s",
            origin=datetime.fromtimestamp(origin, UTC) if origin > 0 else None,
            metrics=tuple(self.metrics),
            low=start,
            high=end,
            segments=tuple(segments),
            marks=tuple(self._marks(axis, origin)),
            sampled=sampled,
        )

    def _marks(self, axis: Axis, origin: float) -> Iterator[CurveMark]:
        begun: set[int] = set()
        for segment in self._steps:
            if segment.attempt not in begun and len(begun) < _MOST_MARKS:
                x = _axis(segment, axis)[0] - origin
                yield CurveMark(kind="attempt", x=x, step=int(segment.steps[0]), attempt=segment.attempt)
            begun.add(segment.attempt)
        for attempt, step, time in self._saved[-_MOST_MARKS:]:
            x = step if axis == "step" else time - origin
            if x == x:  # noqa: PLR0124 (NaN)
                yield CurveMark(kind="checkpoint", x=x, step=step, attempt=attempt)


def _axis(segment: Segment, axis: Axis) -> array[float]:
    return segment.steps if axis == "step" else segment.times


def _repeated(segments: list[Segment]) -> list[int | None]:
    """For each segment the row from which on a later one did the work again."""
    cuts: list[int | None] = []
    first = math.inf
    for segment in reversed(segments):
        place = bisect_left(segment.steps, first)
        cuts.append(place if place < len(segment.steps) else None)
        first = min(first, segment.steps[0])
    return cuts[::-1]


def _downsample(
    xs: array[float], ys: array[float], *, first: int, last: int, points: int, origin: float
) -> Iterator[Point]:
    """Rows from `first` to `last`, or of each interval its lowest and its highest one, in order."""
    width = max(1, math.ceil(2 * (last - first) / max(2, points)))
    for at in range(first, last, width):
        for place in _extremes(ys, at, min(last, at + width)) if width > 1 else (at,):
            y = ys[place]
            if y == y:  # noqa: PLR0124 (NaN: nothing was written)
                yield xs[place] - origin, None if y == _SICK else float(f"{y:.7g}")


def _extremes(ys: array[float], start: int, end: int) -> list[int]:
    part = ys[start:end]
    low, high = min(part), max(part)
    if low != low or high == _SICK:  # noqa: PLR0124 (NaN first poisons both)
        rows = [place for place, y in enumerate(part) if y == y and y != _SICK]  # noqa: PLR0124
        sick = [place for place, y in enumerate(part) if y == _SICK][:1]
        if rows:
            rows = [min(rows, key=part.__getitem__), max(rows, key=part.__getitem__)]
        return sorted({start + place for place in (*rows, *sick)})
    return sorted({start + part.index(low), start + part.index(high)})
