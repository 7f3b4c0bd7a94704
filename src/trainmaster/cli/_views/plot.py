"""A curve for the terminal, drawn with braille dots: two columns and four rows of dots in every character."""

from __future__ import annotations

from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Unicode block 2800: bit of (row, column)
_BLANK = 0x2800
_LABEL = 8  # characters before each row


def curve(points: Sequence[tuple[float, float | None]], *, width: int = 60, height: int = 10) -> list[str]:
    """The points as `height` lines of `width` characters, with the highest and lowest value before them.

    A point without a value leaves a gap.
    """
    xs, ys = [x for x, _ in points], [y for _, y in points if y is not None]
    if not ys:
        return []
    low, high, left, right = min(ys), max(ys), min(xs), max(xs)  # a foreign script may count its steps backwards
    cells = [[0] * width for _ in range(height)]
    last: tuple[int, int] | None = None
    for x, y in points:
        if y is None:
            last = None
            continue
        column = round((x - left) / ((right - left) or 1) * (width * 2 - 1))
        # Halves: the difference of two floats may be beyond all of them.
        row = round((high / 2 - y / 2) / ((high / 2 - low / 2) or 1) * (height * 4 - 1))
        for c, r in _between(last, (column, row)):
            cells[r // 4][c // 2] |= _DOTS[r % 4][c % 2]
        last = (column, row)
    labels = {0: _label(high), height - 1: _label(low)}
    rows = ["".join(chr(_BLANK + cell) for cell in line) for line in cells]
    return [f"{labels.get(i, ''):>{_LABEL}} {row}" for i, row in enumerate(rows)]


def _label(value: float) -> str:
    """A value in at most `_LABEL` characters, with as many decimals as fit."""
    power = f"{value:.1e}"
    fixed = [f"{value:.{places}f}" for places in (3, 2, 1, 0)] if abs(value) < 1e6 else []
    return next((text for text in (*fixed, power) if len(text) <= _LABEL), power.replace("e+", "e"))


def _between(start: tuple[int, int] | None, end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line, so that a steep fall shows no gaps."""
    if start is None:
        return [end]
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * i / steps), round(start[1] + (end[1] - start[1]) * i / steps))
        for i in range(1, steps + 1)
    ]
