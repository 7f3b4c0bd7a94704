"""Rate limits: a token bucket for each caller, in memory; and turns for requests that cost seconds of CPU."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from trainmaster.web.errors import Refused

_MOST_CALLERS = 10_000  # least recently used callers are forgotten first


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Burst size and sustained rate."""

    per_s: float
    burst: int


# An open page refetches every two seconds and a stream polls twice a second: only a runaway loop reaches these.
ASKING = Rate(per_s=100.0, burst=500)
GUESSING = Rate(per_s=0.2, burst=20)  # wrong tokens from one address


class Limiter:
    """Buckets by caller. Threads may share it."""

    def __init__(self, rate: Rate, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, and the time of that count
        self._lock = threading.Lock()

    def take(self, caller: str) -> float:
        """0 where the caller may proceed; else the seconds until its next request may."""
        now = self._clock()
        with self._lock:
            left, at = self._buckets.pop(caller, (float(self._rate.burst), now))
            left = min(float(self._rate.burst), left + (now - at) * self._rate.per_s)
            wait = 0.0 if left >= 1.0 else (1.0 - left) / self._rate.per_s
            self._buckets[caller] = (left if wait else left - 1.0, now)
            while len(self._buckets) > _MOST_CALLERS:
                self._buckets.popitem(last=False)
        return wait


LARGE_BYTES = 1 << 16  # body of a submission whose check takes a tenth of a second
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Turns:
    """Costly work of requests, a few at once; others wait, and where many do the next is told to come later.

    So one caller cannot take every thread, and what is done for callers that have gone away is bounded.
    """

    def __init__(self, *, at_once: int = 2, waiting: int = 8) -> None:
        self._turn = asyncio.Semaphore(at_once)
        self._room = at_once + waiting
        self._here = 0

    async def run(self, work: Callable[_P, _R], *args: _P.args, **more: _P.kwargs) -> _R:
        """What `work` returns, from a thread; Refused (503) where too many wait."""
        if self._here >= self._room:
            message = "many large submissions are being checked; nothing was created, send it again later"
            raise Refused(503, "busy", message, headers={"Retry-After": "5"})
        self._here += 1
        try:
            async with self._turn:
                return await run_in_threadpool(work, *args, **more)
        finally:
            self._here -= 1
