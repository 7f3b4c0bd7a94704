"""Figures in the lines that a program prints: `step 10 | loss 2.31`, `iter 10: loss 2.31`, a dict, a progress bar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trainmaster.node.curves import Point, Tail, to_number

_NUMBER = r"([-+]?(?:nan|inf(?:inity)?|\d[\d,_]*\.?\d*(?:e[-+]?\d+)?))(?![\w%])"
_IS = r"['\"]?\s*[:=]?\s*\(?['\"]?"  # between a name and its number
_STEP = re.compile(rf"\b(?:global[ _])?(?:steps?|iter(?:ation)?s?|it)\b{_IS}\[?\s*(\d[\d,_]{{0,15}})", re.I)
_BATCH = re.compile(
    rf"\bepoch\b{_IS}\[?(\d{{1,6}}).{{0,40}}?\b(?:batch|step|iter)?\s*\[?(\d{{1,9}})\s*/\s*(\d{{1,9}})", re.I
)
BAR = re.compile(r"\|\s*(\d{1,12})/(\d{1,12})\s*\[")  # tqdm
_FIGURES = {
    "eval_loss": re.compile(rf"\b(?:val(?:id(?:ation)?)?|eval(?:uation)?|test)[ _/]?loss{_IS}{_NUMBER}", re.I),
    "loss": re.compile(
        rf"(?<![A-Za-z])(?:(?:train(?:ing)?|lm|total|avg|mean)[ _/])*loss(?:_step)?{_IS}{_NUMBER}", re.I
    ),
    "lr": re.compile(rf"\b(?:lr|learning[ _-]rate){_IS}{_NUMBER}", re.I),
    "grad_norm": re.compile(rf"\b(?:grad(?:ient)?[ _]norm|gnorm){_IS}{_NUMBER}", re.I),
    "tokens_per_s": re.compile(
        rf"\b(?:tok(?:ens)?(?:/|_|_per_| per )s(?:ec(?:ond)?)?|tps){_IS}{_NUMBER}"
        rf"|\b{_NUMBER}\s*tok(?:ens)?/s(?:ec)?\b",
        re.I,
    ),
}
# `RuntimeError: …`, `[rank0]: torch.cuda.OutOfMemoryError: …`, and `raise …` of a traceback: text about a failure.
_FAILURE = re.compile(r"(?:\[[^\]]{1,80}\]:?)?\s*(?:raise\s|[\w.]{1,200}(?<=\w)(?:Error|Exception):\s)")
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST = 2000  # characters of a line that are looked at
_AT_MOST = 20_000  # lines of one look


class LogLines:
    """The standard output of rank 0."""

    name = "log"

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, skip=True)
        self._held, self._redrawn = b"", False
        self._bar: int | None = None  # step of the last progress bar, for lines that name none

    def read(self) -> list[Point]:
        data, anew = self._tail.read()
        text = (b"" if anew else self._held) + data
        *lines, held = re.split(rb"[\r\n]+", text)
        if lines or anew:
            self._redrawn = text[: len(text) - len(held)].endswith(b"\r")
        self._held = held[-_LONGEST * 4 :]
        return self._points(lines[-_AT_MOST:])

    def end(self) -> list[Point]:
        """The last redraw of a progress bar that was killed: no line ends it. It is written at once, and so is whole;
        of a line that nothing ends, that is not known."""
        held, self._held = self._held, b""
        return self._points([held]) if self._redrawn else []

    def _points(self, lines: Sequence[bytes]) -> list[Point]:
        points = (self._point(line[:_LONGEST].decode(errors="replace")) for line in lines)
        return [point for point in points if point is not None]

    def _point(self, line: str) -> Point | None:
        line = COLOURS.sub("", line)
        bar = BAR.search(line)
        if bar is not None:
            self._bar = int(bar[1])
        if "loss" not in line.lower() or _FAILURE.match(line):
            return None
        figures: dict[str, float] = {}
        left = line
        for name, pattern in _FIGURES.items():
            if (hit := pattern.search(left)) is None:
                continue
            number = to_number(next(group for group in hit.groups() if group is not None))
            if number is not None:
                figures[name] = number
            if name == "eval_loss":  # or its end would be read as a training loss
                left = left[: hit.start()] + " " + left[hit.end() :]
        step = _step(line)
        step = self._bar if step is None else step
        return Point(step=step, figures=figures) if step is not None and figures else None


def _step(line: str) -> int | None:
    if batch := _BATCH.search(line):
        epoch, at, of = (int(group) for group in batch.groups())
        if 0 < at <= of and not _STEP.search(line[: batch.start()]):
            return epoch * of + at
    if found := _STEP.search(line):
        return int(re.sub(r"[,_]", "", found[1]))
    return None
