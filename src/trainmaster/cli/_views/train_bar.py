"""Output of a training run at the terminal: what rank 0 prints, each step once, with a progress bar.

The log holds two lines per step: the heartbeat, for programs that watch logs, and the line for people. Heartbeats move
the bar and are not printed. Where standard output is no terminal there is no bar, and the other lines pass unchanged.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from trainmaster.cli import _console
from trainmaster.core import heartbeat
from trainmaster.core.clean_text import clean

_STEP = re.compile(heartbeat.LINE_PREFIX + r"step \d+/\d+ ")


class TrainView:
    """Prints the log of rank 0 piece by piece; a context manager, because a bar has to be closed."""

    def __init__(self) -> None:
        self._rest = b""  # half a line
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if _console.out.is_terminal:
            columns = (
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=_console.out)

    def __enter__(self) -> TrainView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        if self._bar is not None:
            self._bar.stop()

    def feed(self, piece: bytes) -> None:
        """The next bytes of the log."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line)
        sys.stdout.flush()

    def _line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace")
        beat = heartbeat.parse(line)
        if beat is not None:
            self._move(beat)
        elif self._bar is None:
            sys.stdout.buffer.write(raw + b"\n")
        elif not _STEP.match(line):  # the bar shows the step
            self._bar.console.print(Text(clean(line)), soft_wrap=True)

    def _move(self, beat: heartbeat.Beat) -> None:
        if self._bar is None:
            return
        words = f"loss {beat.loss:.4f}  {beat.tokens_per_s:,.0f} tokens/s"
        if self._task is None:
            self._task = self._bar.add_task(words, total=beat.steps)
        self._bar.update(self._task, completed=beat.step, total=beat.steps, description=words)


def show_from(log: Path, offset: int, view: TrainView) -> int:
    """Show what a log holds from an offset on; the offset of its end."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            piece = file.read()
    except FileNotFoundError:
        return offset
    view.feed(piece)
    return offset + len(piece)
