"""Values from nodes, made safe to draw: a number or nothing, and curves of bounded length."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

from trainmaster.api.run import Point


def number(data: Mapping[str, Any], name: str) -> float | None:
    """A finite number, or None for anything else a node may have written (NaN arrives as text)."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def sick_text(data: Mapping[str, Any], name: str) -> str | None:
    """NaN, Infinity or -Infinity where a metric was written and is no number, None where it is one or is absent."""
    value = data.get(name)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity") else None


def whole(data: Mapping[str, Any], name: str) -> int | None:
    """A count from zero, or None."""
    value = number(data, name)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def text(data: Mapping[str, Any], name: str) -> str | None:
    """Text, or None where there is none; other scalars as they print."""
    value = data.get(name)
    if value is None or isinstance(value, (dict, list)):
        return None
    return str(value)


_NOTHING = (math.inf, -math.inf)


class Curve:
    """Points added one by one, of which a bounded number is kept, however long the run.

    Neighbours share a cell; when there are too many cells, each two become one. A cell keeps its lowest and its
    highest point and one gap, in order: a spike of a single step is what the reader looks for, and averaging or
    leaving out every second point would hide it. First and last always stay.

    A server holds the curves of a thousand jobs: they are plain numbers, 16 bytes a point.
    """

    def __init__(self, *, limit: int) -> None:
        self._most_cells = max(2, limit // 2 & ~1)  # even, so that cells pair off
        self._xs, self._ys = array("d"), array("d")  # the points of all cells; a gap is NaN
        self._sizes = bytearray()  # points of each cell
        self._width = 1  # points that came into a cell
        self._room = 0  # left in the last cell
        self._span = _NOTHING  # lowest and highest of the last cell
        self._first: Point | None = None
        self._last: Point | None = None

    def add(self, x: float, y: float | None) -> None:
        point = (x, y)
        self._first = self._first or point
        self._last = point
        if not self._room:
            self._begin(x, y)
            return
        self._room -= 1
        low, high = self._span
        if y is not None and low <= y <= high:
            return  # nothing new; so it is for nearly every point of a long run, and must be cheap
        start = len(self._xs) - self._sizes.pop()
        cell = (*self._slice(start), point)
        del self._xs[start:], self._ys[start:]
        self._append(_extremes(cell))
        if y is not None:
            self._span = (min(low, y), max(high, y))

    def points(self) -> tuple[Point, ...]:
        """What was kept, in the order it came."""
        kept = self._slice(0)
        if self._first is not None and kept[0] != self._first:
            kept.insert(0, self._first)
        if self._last is not None and kept[-1] != self._last:
            kept.append(self._last)
        return tuple(kept)

    def _begin(self, x: float, y: float | None) -> None:
        """A new cell, with its first point."""
        if len(self._sizes) == self._most_cells:
            self._halve()
        self._xs.append(x)
        self._ys.append(math.nan if y is None else y)
        self._sizes.append(1)
        self._span = _NOTHING if y is None else (y, y)
        self._room = self._width - 1

    def _halve(self) -> None:
        points, sizes = self._slice(0), bytes(self._sizes)
        self._xs, self._ys, self._sizes = array("d"), array("d"), bytearray()
        start = 0
        for left, right in zip(sizes[::2], sizes[1::2], strict=True):
            self._append(_extremes(tuple(points[start : start + left + right])))
            start += left + right
        self._width *= 2

    def _append(self, cell: tuple[Point, ...]) -> None:
        self._xs.extend(x for x, _ in cell)
        self._ys.extend(math.nan if y is None else y for _, y in cell)
        self._sizes.append(len(cell))

    def _slice(self, start: int) -> list[Point]:
        pairs = zip(self._xs[start:], self._ys[start:], strict=True)
        return [(int(x) if x.is_integer() else x, y if y == y else None) for x, y in pairs]  # noqa: PLR0124 (NaN)


def _extremes(points: tuple[Point, ...]) -> tuple[Point, ...]:
    numbers = [(y, place) for place, (_, y) in enumerate(points) if y is not None]
    places = {place for place, (_, y) in enumerate(points) if y is None}
    wanted = {min(places)} if places else set()
    if numbers:
        wanted |= {min(numbers)[1], max(numbers)[1]}
    return tuple(points[place] for place in sorted(wanted))
