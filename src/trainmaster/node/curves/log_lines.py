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
_TITLE = re.compile(r"^(.*?)(?:\d{1,3}%)?\|")  # what stands before a bar: `Writing model shards: 100%|`
_UP = "\x1b[A"  # tqdm writes it behind a bar that is drawn below another one
_OF_TRAINING = re.compile(
    r"\W*(?:(?:pre-?)?train(?:ing|er)?|fine-?tun\w*|epochs?|(?:global )?steps?|it(?:er(?:ation)?s?)?)\b", re.I
)
_OF_A_TEST = re.compile(r"\b(?:val(?:id\w*)?|eval\w*|test(?:s|ing)?|predict\w*|infer\w*)\b(?![ _/]?loss)", re.I)
# Means over the whole training, which the Trainer prints at its end: no loss of a step.
_SUMMARY = re.compile(r"['\"]train_runtime['\"]|^\s*train_loss\s+=")
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
    """The standard output of rank 0.

    A line without a step has the step of the training's progress bar. Bars below it (an evaluation's) and those with a
    title of something else (`Writing model shards`) count other things. The Trainer prints its dicts with tqdm.write,
    which wipes the bars, prints and draws them again: the bar before such a line may be old, the one after it is right.
    """

    name = "log"

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, skip=True)
        self._held, self._redrawn = b"", False
        self._bar: int | None = None  # step of the training's bar
        self._whole: int | None = None  # its total, known with the first loss that has its step from it
        self._wiped, self._waiting = False, list[dict[str, float]]()  # printed after a wipe, until the bar is redrawn
        self._last: dict[str, int] = {}  # by figure: of one process, the count of the bar only grows
        self.dicts = False  # a dict without a step was read, as the Trainer prints them

    def read(self) -> list[Point]:
        data, anew = self._tail.read()
        text = (b"" if anew else self._held) + data
        *lines, held = re.split(rb"[\r\n]+", text)
        if lines or anew:
            self._redrawn = text[: len(text) - len(held)].endswith(b"\r")
        self._held = held[-_LONGEST * 4 :]
        points = self._points(lines[-_AT_MOST:])
        if self._waiting and self._whole is not None and held.endswith(b"]"):  # its line ends with the next redraw
            bar = BAR.search(held.decode(errors="replace"))
            points += self._settle(int(bar[1])) if bar is not None and int(bar[2]) == self._whole else []
        return points

    def end(self) -> list[Point]:
        """The last redraw of a progress bar that was killed: no line ends it. It is written at once, and so is whole;
        of a line that nothing ends, that is not known."""
        held, self._held = self._held, b""
        return self._points([held]) if self._redrawn else []

    def _points(self, lines: Sequence[bytes]) -> list[Point]:
        points: list[Point] = []
        for line in lines:
            points += self._read_line(line[:_LONGEST].decode(errors="replace"))
            if line:
                self._wiped = not line.replace(_UP.encode(), b"").strip(b" ")
        return points

    def _read_line(self, raw: str) -> list[Point]:
        line = COLOURS.sub("", raw)
        bar = BAR.search(line)
        points = self._look_at_bar(line, bar, below=raw.endswith(_UP)) if bar is not None else []
        if "loss" not in line.lower() or _FAILURE.match(line) or _SUMMARY.search(line):
            return points
        figures = _figures(line)
        if not figures or (bar is not None and not _is_training(line, loss=True)):
            return points
        step = _step(line)
        if step is not None:
            return [*points, Point(step=step, figures=figures)]
        if bar is not None:
            return [*points, *self._by_bar(int(bar[1]), figures, redrawn=True)]
        self.dicts = self.dicts or line.lstrip().startswith("{")
        if self._wiped and self._bar is not None:
            self._waiting.append(figures)
            return points
        return [*points, *(self._by_bar(self._bar, figures) if self._bar is not None else [])]

    def _look_at_bar(self, line: str, bar: re.Match[str], *, below: bool) -> list[Point]:
        at, whole = int(bar[1]), int(bar[2])
        other = self._whole not in (None, whole) and not self._waiting
        if below or other or not _is_training(line, loss=False):
            return []
        if self._waiting:
            self._whole = whole
        self._bar = at
        return self._settle(at)

    def _settle(self, step: int) -> list[Point]:
        waiting, self._waiting = self._waiting, []
        return [point for figures in waiting for point in self._by_bar(step, figures)]

    def _by_bar(self, step: int, figures: dict[str, float], *, redrawn: bool = False) -> list[Point]:
        """A bar that begins anew, as of a second epoch, tells no step: what it had before was not done again.

        A bar with the figures in it is drawn again at the same step.
        """
        kind = "loss" if "loss" in figures else "eval_loss"
        last = self._last.get(kind, -1)
        if step < last or (step == last and not redrawn):
            return []
        self._last[kind] = step
        return [Point(step=step, figures=figures)]


def _is_training(line: str, *, loss: bool) -> bool:
    """Whether the title of a bar names nothing else; with its loss in it, it may have any title but an evaluation's."""
    found = _TITLE.match(line)
    title = found[1].strip() if found is not None else ""
    if _OF_A_TEST.search(title):
        return False
    return loss or not title or "loss" in title.lower() or _OF_TRAINING.match(title) is not None


def _figures(line: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, pattern in _FIGURES.items():
        if (hit := pattern.search(line)) is None:
            continue
        number = to_number(next(group for group in hit.groups() if group is not None))
        if number is not None:
            figures[name] = number
        if name == "eval_loss":  # or its end would be read as a training loss
            line = line[: hit.start()] + " " + line[hit.end() :]
    return figures


def _step(line: str) -> int | None:
    if batch := _BATCH.search(line):
        epoch, at, of = (int(group) for group in batch.groups())
        if 0 < at <= of and not _STEP.search(line[: batch.start()]):
            return epoch * of + at
    if found := _STEP.search(line):
        return int(re.sub(r"[,_]", "", found[1]))
    return None
