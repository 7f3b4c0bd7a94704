"""A curve of any length keeps a bounded number of points, and none of its extremes is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.pages.parts.downsample import Curve, number, whole

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6))


@pytest.mark.slow
@given(st.lists(VALUES, max_size=400), st.integers(8, 60))
def test_bounded_ordered_and_no_extreme_is_lost(values: list[float | None], limit: int) -> None:
    curve = Curve(limit=limit)
    for step, value in enumerate(values):
        curve.add(step, value)
    points = curve.points()
    gaps = limit // 2 if None in values else 0
    assert len(points) <= limit + gaps + 2
    steps = [x for x, _ in points]
    assert steps == sorted(set(steps))
    assert all(values[int(x)] == y for x, y in points)
    if values:
        assert (steps[0], steps[-1]) == (0, len(values) - 1)
    numbers = [value for value in values if value is not None]
    if numbers:
        assert {min(numbers), max(numbers)} <= {y for _, y in points}
    assert (None in values) == any(y is None for _, y in points)


def test_one_spike_in_a_long_run_is_kept() -> None:
    curve = Curve(limit=100)
    for step in range(100_000):
        curve.add(step, 50.0 if step == 61_803 else 1.0)
    assert (61_803, 50.0) in curve.points()
    assert len(curve.points()) <= 102


def test_only_numbers_are_numbers() -> None:
    data = {"a": 1.5, "b": "1.5", "c": True, "d": float("inf"), "e": None, "f": -1, "g": 3}
    assert [number(data, name) for name in "abcdefgh"] == [1.5, None, None, None, None, -1.0, 3.0, None]
    assert [whole(data, name) for name in "afg"] == [None, None, 3]
