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


def test_steps_that_go_backwards_are_drawn() -> None:
    """A script of somebody else may print any step."""
    lines = curve([(30.0, 1.0), (60.0, 2.0), (1.0, 3.0)], width=10, height=3)
    assert len({len(line) for line in lines}) == 1


def test_values_at_the_end_of_what_a_float_holds_are_drawn() -> None:
    lines = curve([(1.0, -1e308), (2.0, 1.7e308), (3.0, 1.0)])
    assert lines[0].split()[0] == "1.7e+308" and lines[-1].split()[0] == "-1.0e308"
    assert {len(line) - len(line.split()[-1]) for line in lines[1:-1]} == {9}
    assert len({len(line) for line in lines}) == 1, "no label shifts its row"


def test_labels_have_as_many_decimals_as_fit() -> None:
    shown = {(low, high): curve([(0, low), (1, high)]) for low, high in ((-123456.7, 12345.678), (-1e6, 1e6))}
    assert [[lines[-1].split()[0], lines[0].split()[0]] for lines in shown.values()] == [
        ["-123457", "12345.68"],
        ["-1.0e+06", "1.0e+06"],
    ]
    assert len({len(line) for lines in shown.values() for line in lines}) == 1
