"""What a run says: events to the event file (rank 0 alone) and lines to standard output.

Local rank 0 of every node prints: an operator watches one process a node, and a silent node looks hung.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trainmaster.core import heartbeat
from trainmaster.core.heartbeat import At
from trainmaster.node.emit import Emitter
from trainmaster.train.metrics.trackers import Tracker
from trainmaster.train.parallel.rank_info import RankInfo

# Log readers on nodes may know no more than ASCII, and one of them ends at the first byte it does not know.
_PLAIN = str.maketrans({"×": "x", "→": "to", "–": "-", "…": "..."})


class RunLog:
    """One rank's voice."""

    def __init__(self, rank_info: RankInfo, emitter: Emitter | None) -> None:
        self._rank_info = rank_info
        self._emitter = emitter if rank_info.rank == 0 else None
        self._trackers: list[Tracker] = []

    def track(self, trackers: list[Tracker]) -> None:
        """Numbers go there too from now on, from rank 0."""
        self._trackers = trackers if self._rank_info.rank == 0 else []

    def event(self, phase: str, event: str, *, epoch: int | None = None, **data: Any) -> None:
        """An event, from rank 0. Training goes on without it when its file cannot be written."""
        if event == "metrics":
            self._track("eval" if phase == "EVAL_MODEL" else "train", data)
        if self._emitter is None:
            return
        try:
            self._emitter.emit(phase, event, epoch=epoch, **data)
        except OSError as wrong:
            self.alarm(f"event {phase} {event} could not be written: {wrong}")

    def line(self, text: str) -> None:
        """A line for people and log rules, from local rank 0 of each node."""
        if self._rank_info.local_rank == 0:
            self.alarm(text)

    def beat(
        self, *, step: int, steps: int, loss: float, grad_norm: float, tokens_per_s: float, step_s: float, at: At
    ) -> None:
        """The line that log rules wait for, from local rank 0 of each node and from the thread that trains."""
        beat = heartbeat.Beat(
            rank=self._rank_info.rank,
            node=self._rank_info.node_rank,
            step=step,
            steps=steps,
            loss=loss,
            grad_norm=grad_norm,
            tokens_per_s=tokens_per_s,
            step_s=step_s,
            at=at,
        )
        self.line(heartbeat.words(beat))

    def alarm(self, text: str) -> None:
        """A line from whichever rank it is, in one write: who reads along takes half a line for a whole one."""
        plain = text.translate(_PLAIN).encode("ascii", "backslashreplace").decode()
        sys.stdout.write(heartbeat.prefix(self._rank_info.rank, self._rank_info.node_rank) + plain + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        for tracker in self._trackers:
            self._safely(tracker, tracker.close)
        self._trackers = []

    def _track(self, group: str, data: Mapping[str, Any]) -> None:
        step = data.get("step")
        numbers = {
            f"{group}/{name}": float(value)
            for name, value in data.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if isinstance(step, int) and numbers:
            for tracker in list(self._trackers):
                self._safely(tracker, lambda tracker=tracker: tracker.log(step, numbers))

    def _safely(self, tracker: Tracker, act: Any) -> None:
        try:
            act()
        except Exception as wrong:  # a foreign library and a network; training must not end for a chart
            self._trackers = [other for other in self._trackers if other is not tracker]
            self.alarm(f"{tracker.name} is left out from here on: {type(wrong).__name__}: {wrong}")
