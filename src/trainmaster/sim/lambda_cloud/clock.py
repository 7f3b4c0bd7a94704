"""Simulated time: every duration of the simulator passes `factor` times as fast as real time."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the start of the simulator, in simulated time."""

    def __init__(self, factor: float = 1.0) -> None:
        assert factor > 0
        self.factor = factor
        self._start = time.monotonic()

    def now_s(self) -> float:
        return (time.monotonic() - self._start) * self.factor

    def real_s(self, simulated_s: float) -> float:
        """Real seconds that a simulated duration takes."""
        return simulated_s / self.factor
