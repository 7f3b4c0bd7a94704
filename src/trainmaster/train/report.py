"""What a run says: events to the event file (rank 0 alone) and lines to standard output.

Local rank 0 of every node prints: an operator watches one process a node, and a silent node looks hung.
"""

from __future__ import annotations

import sys
from typing import Any

from trainmaster.node.emit import Emitter
from trainmaster.train.place import Place


class Report:
    """One rank's voice."""

    def __init__(self, place: Place, emitter: Emitter | None) -> None:
        self._place = place
        self._emitter = emitter if place.rank == 0 else None

    def event(self, phase: str, event: str, *, epoch: int | None = None, **data: Any) -> None:
        """An event, from rank 0. Training goes on without it when its file cannot be written."""
        if self._emitter is None:
            return
        try:
            self._emitter.emit(phase, event, epoch=epoch, **data)
        except OSError as wrong:
            self.alarm(f"event {phase} {event} could not be written: {wrong}")

    def line(self, text: str) -> None:
        """A line for people and log rules, from local rank 0 of each node."""
        if self._place.local_rank == 0:
            self.alarm(text)

    def alarm(self, text: str) -> None:
        """A line from whichever rank it is."""
        sys.stdout.write(f"[rank {self._place.rank} node {self._place.node_rank}] {text}\n")
        sys.stdout.flush()
