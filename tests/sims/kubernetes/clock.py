"""Time of a simulated cluster: it passes while the test sleeps, or a given number of times as fast as real time."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta


class SimulatedClock:
    """Time that passes only in `sleep`, and there after a round of the controllers: a busy machine changes nothing."""

    def __init__(self, *, stride_s: float = 0.0) -> None:
        self._begin, self._passed, self.stride_s = datetime.now(UTC), 0.0, stride_s  # the least that a sleep passes
        self.wanted = False  # a round of the controllers
        self.rounds = 0

    def now(self) -> float:
        return self._passed

    def utc(self) -> datetime:
        return self._begin + timedelta(seconds=self._passed)

    async def sleep(self, seconds: float) -> None:
        seen, self.wanted = self.rounds, True
        while self.rounds == seen:  # noqa: ASYNC110 (of another thread's loop)
            await asyncio.sleep(0.002)
        self._passed += max(seconds, self.stride_s)


class FastClock:
    """Real time, many times as fast: for programs that have a clock of their own."""

    wanted = False
    rounds = 0

    def __init__(self, factor: float) -> None:
        self._factor, self._begin, self._real = factor, datetime.now(UTC), time.monotonic()

    def utc(self) -> datetime:
        return self._begin + timedelta(seconds=self._factor * (time.monotonic() - self._real))
