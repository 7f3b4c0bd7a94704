"""The terminal curve: its size, its labels, its direction."""

from __future__ import annotations

from trainmaster.cli._views.plot import curve


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    lines = curve([(i, 10.0 - i) for i in range(11)], width=20, height=5)
    assert len(lines) == 5
    assert lines[0].startswith("  10.000 ") and lines[-1].startswith("   0.000 ")
    assert lines[0][9] != "\u2800" and lines[0][-1] == "\u2800"
    assert lines[-1][9] == "\u2800" and lines[-1][-1] != "\u2800"


def test_a_gap_stays_a_gap_and_a_single_point_is_drawn() -> None:
    assert curve([]) == [] and curve([(1, None)]) == []
    assert any("\u2801" in line or "\u2800" not in line[9:10] for line in curve([(1, 2.0)], width=4, height=2))
    lines = curve([(0, 1.0), (1, None), (2, 1.0)], width=9, height=1)
    assert set(lines[0][12:15]) == {"\u2800"}
