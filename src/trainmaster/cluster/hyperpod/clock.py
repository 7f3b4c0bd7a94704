"""Time of a test of a cluster."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Time of a test: that of this machine, or of a simulation."""

    def now(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """Time of this machine."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
