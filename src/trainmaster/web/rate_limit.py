"""Rate limits: a token bucket for each caller, in memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

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
