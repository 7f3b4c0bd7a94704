"""Steps and losses of a command that writes no events: read from its output and its trackers' files, kept as events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from trainmaster.core.compat import UTC
from trainmaster.core.events import Event, render
from trainmaster.core.files import append_plain
from trainmaster.core.plan import EVENTS_FILE, OUTPUTS_FOLDER, Plan, rank_log
from trainmaster.node.curves import Point
from trainmaster.node.curves.find import READ_FROM, Curves

_AT_ONCE = 500  # points of one look; of more, every second or third is kept, and the last


class Figures:
    """Of the first node of a job with a `command`; our trainer writes its own events."""

    def __init__(self, plan: Plan, work: Path) -> None:
        self._events = Path(plan.folder) / EVENTS_FILE
        self._curves: Curves | None = None
        if plan.spec.train is None and plan.node_rank == 0:
            folders = (work, Path(plan.folder) / OUTPUTS_FOLDER, Path(plan.checkpoints))
            self._curves = Curves(Path(plan.folder) / rank_log(0), folders, self._events)

    def copy(self, *, last: bool = False) -> None:
        """Append what is new. Neither a full disk nor a strange file may stop the run."""
        if self._curves is None:
            return
        with contextlib.suppress(OSError):
            points = self._curves.look(last=last)
            if points:
                self._append(points[:: -(-len(points) // _AT_ONCE)] + points[-1:] * (len(points) > _AT_ONCE))

    def _append(self, points: list[Point]) -> None:
        assert self._curves is not None
        source = self._curves.source or ""
        lines = [render(event) for point in points for event in _events(point, source)]
        append_plain(self._events, ("\n".join(lines) + "\n").encode())


def _events(point: Point, source: str) -> Iterator[Event]:
    now = datetime.now(UTC) if point.at is None else datetime.fromtimestamp(point.at, UTC)
    figures = dict(point.figures)
    held_out = figures.pop("eval_loss", None)
    if figures:
        yield Event(phase="STEP", event="metrics", ts=now, data={"step": point.step, **figures, READ_FROM: source})
    if held_out is not None:
        data = {"step": point.step, "loss": held_out, READ_FROM: source}
        yield Event(phase="EVAL_MODEL", event="metrics", ts=now, data=data)
