"""Charts are well-formed SVG that says in words what it draws, and its path is the data."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.report import chart
from trainmaster.report.chart import Line, Mark, ticks

FINITE = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)


def draw(lines: list[Line], marks: list[Mark] | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(chart.render(key="loss", title="Loss", x_name="step", lines=lines, marks=marks or []))


def test_the_path_is_the_data() -> None:
    figure = draw([Line(name="training", points=[(1, 5.5), (2, 4.25), (3, 4.0)])])
    (path,) = figure.iter("path")
    assert path.get("d") == "M1 5.5L2 4.25L3 4"


def test_a_gap_and_a_step_back_lift_the_pen() -> None:
    figure = draw([Line(name="training", points=[(1, 5), (2, None), (3, 4), (4, 3), (3, 3.5), (4, 2)])])
    (path,) = figure.iter("path")
    assert path.get("d") == "M1 5M3 4L4 3M3 3.5L4 2"


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
    _, _, width, height = map(float, box.get("viewBox").split())
    assert width > 0
    assert height > 0
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
