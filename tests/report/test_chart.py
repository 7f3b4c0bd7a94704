"""Charts are well-formed SVG that says in words what it draws, and carries the data for its read-out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.api.run import Point
from trainmaster.report import chart, formats
from trainmaster.report.chart import Line, Mark, ticks

FINITE = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)


def draw(lines: list[Line], marks: list[Mark] | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(chart.render(key="loss", title="Loss", x_name="step", lines=lines, marks=marks or []))


def heights(figure: ElementTree.Element) -> list[float]:
    (path,) = figure.iter("path")
    return [float(point.split()[1]) for point in re.split("[ML]", path.get("d", ""))[1:]]


def test_the_line_is_drawn_in_the_box_and_the_data_stand_beside_it() -> None:
    figure = draw([Line(name="training", points=[(1, 5.5), (2, None), (2, 4.25), (3, 4.0)])])
    (path,) = figure.iter("path")
    assert path.get("data-points") == "1 5.5 2 4.25 3 4"
    assert re.sub(r" [\d.]+", "", path.get("d", "")) == "M0M500L1000"
    first, second, third = heights(figure)
    assert (third - first) * (5.5 - 4.25) == pytest.approx((second - first) * (5.5 - 4.0), abs=0.1)
    assert 0 < first < second < third < 1000
    box = next(item for item in figure.iter("svg") if item.get("class") == "data")
    assert (box.get("viewBox"), box.get("data-left"), box.get("data-width")) == ("0 0 1000 1000", "1", "2")


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0, 1e9])
def test_a_line_has_the_same_shape_at_any_scale(scale: float) -> None:
    """Chromium draws a path whose own numbers are very small badly, or not at all."""
    points = [(step, (3.0 - step / 50) * scale) for step in range(25)]
    usual = [(step, 3.0 - step / 50) for step in range(25)]
    assert heights(draw([Line(name="lr", points=points)])) == pytest.approx(
        heights(draw([Line(name="lr", points=usual)])), abs=0.02
    )


@pytest.mark.parametrize("high", [5e-324, 2e-323, 1e-300, 1e305, 2e305, 1.7e308, 10**400])
def test_numbers_at_the_end_of_what_a_float_holds_are_drawn(high: float) -> None:
    for low in (0.0, -high):
        drawn = heights(draw([Line(name="loss", points=[(1.0, low), (2.0, high)])]))
        assert all(0 <= place <= 1000 for place in drawn)


def test_a_gap_and_a_step_back_lift_the_pen() -> None:
    figure = draw([Line(name="training", points=[(1, 5), (2, None), (3, 4), (4, 3), (3, 3.5), (4, 2)])])
    (path,) = figure.iter("path")
    assert re.sub(r"[\d. ]+", " ", path.get("d", "")) == "M M L M L "
    assert path.get("data-points") == "1 5 3 4 4 3 3 3.5 4 2"


def test_it_says_in_words_what_it_draws() -> None:
    figure = draw([Line(name="training", points=[(1, 5.5), (90, 1.2), (200, 2.0)])])
    assert figure.findtext(".//title") == "Loss"
    assert figure.findtext(".//desc") == "training: 5.5 at step 1, 2 at step 200, lowest 1.2, highest 5.5"
    image = next(item for item in figure.iter("svg") if item.get("role") == "img")
    assert image.get("aria-labelledby") == "t-loss d-loss"


def test_evaluations_are_dots_and_checkpoints_are_marks() -> None:
    lines = [
        Line(name="training", points=[(1, 5), (100, 2)]),
        Line(name="held-out", points=[(50, 3), (100, 2.2)], dots=True),
    ]
    figure = draw(lines, [Mark(x=50, label="checkpoint"), Mark(x=100, label="checkpoint"), Mark(x=999, label="x")])
    assert len(list(figure.iter("circle"))) == 2
    assert len([line for line in figure.iter("line") if line.get("class") == "mark"]) == 2  # one lies outside


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf, 1e308, 10**400])
def test_a_point_whose_step_cannot_be_drawn_is_left_out_and_said(x: float) -> None:
    figure = text([(1, 5.0), (x, 4.0), (2, 3.0)], marks=[Mark(x=x, label="checkpoint")])
    assert "1 point is not drawn: the step is no number, or too large to draw." in figure
    assert 'data-points="1 5 2 3"' in figure and "nan" not in figure
    alone = text([(x, 1.0)])
    assert alone.startswith("<p") and "<svg" not in alone


def test_a_value_that_is_no_number_is_a_gap() -> None:
    assert 'data-points="1 5 3 4"' in text([(1, 5.0), (2, math.nan), (3, 4.0)])


def test_a_very_large_step_is_told_exactly() -> None:
    last = 2**63 - 1
    figure = text([(last - 1000, 5.0), (last, 4.0)], dots=True)
    assert f"at step {last:,}" in figure and f"a 4 at {last:,}" in figure and f"{last} 4" in figure
    assert formats.count(last) == "9,223,372,036,854,775,807"


def text(points: list[Point], *, dots: bool = False, marks: Sequence[Mark] = ()) -> str:
    line = Line(name="a", points=points, dots=dots)
    return str(chart.render(key="a", title="A", x_name="step", lines=[line], marks=marks))


def test_nothing_to_draw_draws_nothing() -> None:
    assert chart.render(key="a", title="A", x_name="step", lines=[Line(name="a", points=[])]) == ""
    assert chart.render(key="a", title="A", x_name="step", lines=[Line(name="a", points=[(1, None)])]) == ""


def test_a_thousand_checkpoints_are_not_a_wall() -> None:
    marks = [Mark(x=step, label="checkpoint") for step in range(1000)]
    figure = draw([Line(name="a", points=[(0, 1), (1000, 2)])], marks)
    drawn = [line.findtext("title") for line in figure.iter("line") if line.get("class") == "mark"]
    assert len(drawn) <= 60
    assert drawn[-1] == "checkpoint at 999"


def test_names_are_escaped() -> None:
    figure = draw([Line(name="<b>&\"'", points=[(1, 1), (2, 2)]), Line(name="x", points=[(1, 1)])])
    assert figure.find(".//path").get("data-name") == "<b>&\"'"


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 10**7), st.one_of(st.none(), FINITE)), min_size=1, max_size=20))
def test_any_points_give_a_well_formed_chart(points: list[tuple[float, float | None]]) -> None:
    markup = chart.render(key="a", title="A", x_name="step", lines=[Line(name="a", points=points)], zero=True)
    if not any(y is not None for _, y in points):
        assert markup == ""
        return
    figure = ElementTree.fromstring(markup)
    box = next(item for item in figure.iter("svg") if item.get("viewBox"))
    assert float(box.get("data-width")) > 0
    (path,) = figure.iter("path")
    drawn = [float(number) for number in re.findall(r"-?[\d.]+", path.get("d", ""))]
    assert all(-0.01 <= number <= 1000.01 for number in drawn)
    assert len(drawn) == 2 * sum(y is not None for _, y in points)
    for percent in re.findall(r'(?:x1|y1|x|y)="(-?[\d.]+)%"', markup):
        assert -0.01 <= float(percent) <= 100.01


@given(FINITE, FINITE, st.integers(3, 8))
def test_ticks_are_few_ordered_and_inside(low: float, high: float, most: int) -> None:
    low, high = sorted((low, high))
    found = ticks(low, high, most=most)
    assert 1 <= len(found) <= most
    assert found == sorted(found)
    room = (high - low) * 1e-6
    assert all(low - room <= tick <= high + room for tick in found)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 5, 10]), (0, 0.003, [0, 0.001, 0.002, 0.003]), (1.8, 5.6, [2, 3, 4, 5])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, most=5) == pytest.approx(expected)
