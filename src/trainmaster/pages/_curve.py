"""Values from nodes, made safe to draw: a number or nothing, and curves of bounded length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Point = tuple[float, float | None]  # None: the value was not a number, and a line drawn through it has a gap


def number(data: Mapping[str, Any], name: str) -> float | None:
    """A finite number, or None for anything else a node may have written (NaN arrives as text)."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


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
    """

    def __init__(self, *, limit: int) -> None:
        self._most_cells = max(2, limit // 2 & ~1)  # even, so that cells pair off
        self._cells: list[tuple[Point, ...]] = []
        self._width = 1  # points per cell
        self._room = 0  # left in the last cell
        self._span = _NOTHING  # lowest and highest of the last cell
        self._first: Point | None = None
        self._last: Point | None = None

    def add(self, x: float, y: float | None) -> None:
        point = (x, y)
        self._first = self._first or point
        self._last = point
        if not self._room:
            if len(self._cells) == self._most_cells:
                pairs = zip(self._cells[::2], self._cells[1::2], strict=True)
                self._cells = [_extremes((*left, *right)) for left, right in pairs]
                self._width *= 2
            self._cells.append(())
            self._span = _NOTHING
            self._room = self._width
        self._room -= 1
        low, high = self._span
        if y is not None and low <= y <= high:
            return  # nothing new; so it is for nearly every point of a long run, and must be cheap
        self._cells[-1] = _extremes((*self._cells[-1], point))
        if y is not None:
            self._span = (min(low, y), max(high, y))

    def points(self) -> tuple[Point, ...]:
        """What was kept, in the order it came."""
        kept = [point for cell in self._cells for point in cell]
        if self._first is not None and kept[0] != self._first:
            kept.insert(0, self._first)
        if self._last is not None and kept[-1] != self._last:
            kept.append(self._last)
        return tuple(kept)


def _extremes(points: tuple[Point, ...]) -> tuple[Point, ...]:
    numbers = [(y, place) for place, (_, y) in enumerate(points) if y is not None]
    places = {place for place, (_, y) in enumerate(points) if y is None}
    wanted = {min(places)} if places else set()
    if numbers:
        wanted |= {min(numbers)[1], max(numbers)[1]}
    return tuple(points[place] for place in sorted(wanted))
