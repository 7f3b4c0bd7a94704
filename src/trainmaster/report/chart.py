"""Line charts as inline SVG: no script needed, no library, sharp at every width and on paper.

The plot is an inner `<svg>` of fixed units, stretched to whatever width the page has; labels, marks and dots sit
outside it at percentages, so that text keeps its size on a phone and on a wall. Lines are not drawn in units of the
data: Chromium draws a line of very small heights (a learning rate) badly or not at all. The read-out (chart.js) has the
data beside each line, in `data-points`, and the x axis in `data-left` and `data-width`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from trainmaster.api.run import Point
from trainmaster.report.formats import short, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series. `dots` draws its points too, for series of few, weighty values such as evaluations."""

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An occurrence at x, drawn as a thin vertical line."""

    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The x axis: its ticks (None: round numbers), and the label of a point on it."""

    ticks: Sequence[float] | None = None
    text: Callable[[float], str] | None = None

    def tell(self, x: float) -> str:
        """The label of a tick."""
        return self.text(x) if self.text is not None else _tick(x)

    def name(self, x: float) -> str:
        """A point: a step is whole and exact, however large."""
        return f"{x:,}" if self.text is None and isinstance(x, int) and abs(x) >= _EXACT else self.tell(x)


def render(
    *,
    key: str,
    title: str,
    x_name: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    zero: bool = False,
    small: bool = False,
    x_axis: Axis | None = None,
) -> Markup:
    """The chart as one `<figure>`, or an empty string where there is nothing to draw. `zero` puts 0 on the y axis."""
    axis = x_axis or Axis()
    given = sum(len(line.points) for line in lines)
    lines = [replace(line, points=[(x, _bound(y)) for x, y in line.points if _fits(x)]) for line in lines]
    left_out = given - sum(len(line.points) for line in lines)
    marks = [mark for mark in marks if _fits(mark.x)]
    values = [(x, y) for line in lines for x, y in line.points if y is not None]
    if not values:
        return _note(left_out, x_name)
    left, right = _span([x for x, _ in values], pad=0.0)
    left = 0.0 if 0 < left <= right / 20 else left  # a run that began at step 1 began
    bottom, top = _span([y for _, y in values] + ([0.0] if zero else []), pad=0.06, floor=0.0 if zero else None)
    box = _Box(left=left, right=right, bottom=bottom, top=top)
    body = [_grid(box, x_name, axis), *(_mark(box, mark) for mark in _thin(marks, left, right))]
    body.append(_plot(box, lines))
    body += [_dots(box, line, order, axis) for order, line in enumerate(lines) if line.dots]
    legend = Markup("").join(
        Markup('<span class="key s{}">{}</span>').format(order, line.name) for order, line in enumerate(lines)
    )
    if marks:
        legend += Markup('<span class="key m">{}</span>').format(marks[0].label)
    return Markup(
        '<figure class="chart{small}" id="chart-{key}"><figcaption><b>{title}</b>'
        '<span class="legend">{legend}</span><output class="readout">{read}</output></figcaption>'
        '<div class="plot"><svg class="axes" role="img" tabindex="0" aria-labelledby="t-{key} d-{key}">'
        '<title id="t-{key}">{title}</title><desc id="d-{key}">{desc}</desc>{body}</svg></div>{note}</figure>'
    ).format(
        small=" small" if small else "",
        key=key,
        title=title,
        legend=legend if len(lines) > 1 or marks else "",
        read=_first_to_last(lines[0]),
        desc="; ".join(filter(None, (_describe(line, x_name, axis) for line in lines))),
        body=Markup("").join(body),
        note=_note(left_out, x_name),
    )


def render_bandwidth(
    *, key: str, title: str, measured: Sequence[tuple[float, float]], baseline: Sequence[tuple[float, float]]
) -> Markup:
    """Bandwidth over message size, on a logarithmic axis: sizes double from one point to the next."""
    named = {"measured": measured, "baseline": baseline}
    lines = [
        Line(name=name, points=[(math.log2(size_bytes), rate) for size_bytes, rate in points], dots=True)
        for name, points in named.items()
        if points or name == "measured"
    ]
    xs = sorted({x for line in lines for x, _ in line.points})
    axis = Axis(ticks=xs[:: max(1, math.ceil(len(xs) / 8))], text=lambda x: size(2.0**x))
    return render(key=key, title=title, x_name="message size", lines=lines, zero=True, x_axis=axis)


def _note(left_out: int, x_name: str) -> Markup:
    if not left_out:
        return Markup()
    what = "1 point is" if left_out == 1 else f"{left_out:,} points are"
    return Markup('<p class="quiet small-text">{} not drawn: the {} is no number, or too large to draw.</p>').format(
        what, x_name
    )


def ticks(low: float, high: float, *, most: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) from low to high, at most `most` of them."""
    if not high > low:
        return [low]
    if high - low < 1e-300:  # no power of ten lies between them
        return [low, high]
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1.0, 2.0, 5.0, 10.0, 20.0):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [place * step for place in range(first, last + 1)]
    return [low, high]


_EXACT = 10**15  # from here on a float of six digits is far from the step that it stands for
_SIDE = 1000  # of the box that lines are drawn in
_LARGEST = 1e300  # drawn: beyond it a difference of two numbers is none


def _fits(x: float) -> bool:
    return abs(x) <= _LARGEST  # not of NaN, and not of a whole number beyond every float


def _bound(y: float | None) -> float | None:
    if y is None or (isinstance(y, float) and math.isnan(y)):  # a whole number may be beyond every float
        return None
    return max(-_LARGEST, min(_LARGEST, y))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """The part of the plane that is shown."""

    left: float
    right: float
    bottom: float
    top: float

    def across(self, x: float) -> str:
        return f"{100 * (x - self.left) / (self.right - self.left):.2f}%"

    def down(self, y: float) -> str:
        return f"{100 * (self.top - y) / (self.top - self.bottom):.2f}%"


def _span(values: Sequence[float], *, pad: float, floor: float | None = None) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high == low:
        # A flat line still needs a height to lie in.
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    room = (high - low) * pad
    low, high = low - room, high + room
    return (floor if floor is not None and low > floor - 2 * room else low), high


def _grid(box: _Box, x_name: str, axis: Axis) -> Markup:
    parts = []
    for y in ticks(box.bottom, box.top):
        parts.append(
            Markup(
                '<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/><text class="y" x="-8" y="{y}">{t}</text>'
            ).format(y=box.down(y), t=_tick(y))
        )
    shown = ticks(box.left, box.right, most=8) if axis.ticks is None else axis.ticks
    for place, x in enumerate(shown):
        alternate = " alt" if place % 2 else ""
        parts.append(
            Markup('<text class="x{alt}" x="{x}" y="100%" dy="18">{t}</text>').format(
                alt=alternate, x=box.across(x), t=axis.tell(x)
            )
        )
    parts.append(Markup('<text class="name" x="100%" y="100%" dy="34">{}</text>').format(x_name))
    return Markup("").join(parts)


def _tick(value: float) -> str:
    # 0.30000000000000004 is a tick of 0.3. On an axis 5k stands better beside 10k than 5,000 does.
    value = float(f"{value:.6g}")
    return f"{short(value / 1000)}k" if 1000 <= abs(value) < 1e4 else short(value)


def _plot(box: _Box, lines: Sequence[Line]) -> Markup:
    paths = Markup("").join(
        Markup('<path class="s{}" d="{}" data-name="{}" data-points="{}"/>').format(
            order, path, line.name, " ".join(f"{_n(x)} {_n(y)}" for x, y in line.points if y is not None)
        )
        for order, line in enumerate(lines)
        if (path := _path(box, line.points))
    )
    return Markup(
        '<svg class="data" width="100%" height="100%" preserveAspectRatio="none" viewBox="0 0 {side} {side}"'
        ' data-left="{left}" data-width="{width}">{paths}</svg>'
    ).format(side=_SIDE, left=_n(box.left), width=_n(box.right - box.left), paths=paths)


def _path(box: _Box, points: Iterable[Point]) -> str:
    """M and L commands in units of the box. A gap, or a step back in x (a new attempt), lifts the pen."""
    parts: list[str] = []
    last: float | None = None
    for x, y in points:
        if y is None:
            last = None
            continue
        across = round(_SIDE * (x - box.left) / (box.right - box.left), 2)
        down = round(_SIDE * (box.top - y) / (box.top - box.bottom), 2)
        parts.append(f"{'L' if last is not None and x > last else 'M'}{_n(across)} {_n(down)}")
        last = x
    return "".join(parts)


def _dots(box: _Box, line: Line, order: int, axis: Axis) -> Markup:
    return Markup("").join(
        Markup('<circle class="s{}" cx="{}" cy="{}" r="3.5"><title>{}</title></circle>').format(
            order, box.across(x), box.down(y), f"{line.name} {short(y)} at {axis.name(x)}"
        )
        for x, y in line.points
        if y is not None
    )


def _mark(box: _Box, mark: Mark) -> Markup:
    return Markup('<line class="mark" x1="{x}" x2="{x}" y1="0" y2="100%"><title>{t}</title></line>').format(
        x=box.across(mark.x), t=f"{mark.label} at {_tick(mark.x)}"
    )


_MOST_MARKS = 60  # more upright lines than this are a grey wall


def _thin(marks: Sequence[Mark], left: float, right: float) -> list[Mark]:
    inside = [mark for mark in marks if left <= mark.x <= right]
    every = math.ceil(len(inside) / _MOST_MARKS) or 1
    return inside[::-1][::every][::-1]  # the newest always stays


def _describe(line: Line, x_name: str, axis: Axis) -> str:
    values = [(x, y) for x, y in line.points if y is not None]
    if not values:
        return ""
    ys = [y for _, y in values]
    first, last = values[0], values[-1]
    return (
        f"{line.name}: {short(first[1])} at {x_name} {axis.name(first[0])}, "
        f"{short(last[1])} at {x_name} {axis.name(last[0])}, "
        f"lowest {short(min(ys))}, highest {short(max(ys))}"
    )


def _first_to_last(line: Line) -> str:
    ys = [y for _, y in line.points if y is not None]
    return f"{short(ys[0])} → {short(ys[-1])}" if ys else ""


def _n(value: float) -> str:
    """Whole numbers whole (steps); others to six digits: more than a screen shows, and a report stays small."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if value == int(value) and abs(value) < _EXACT else f"{value:.6g}"
