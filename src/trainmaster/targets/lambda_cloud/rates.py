"""Rate limits of the API, kept for all jobs of a process: one request a second, one launch in twelve.

A turn is a point in time, taken in advance. Nothing here belongs to an event loop: several may share one account.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

_MAX_PAUSE_S = 300.0  # a Retry-After of a day would hold every job


class Rates:
    """Turns for requests and launches to one account."""

    def __init__(self, *, request_s: float, launch_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._request_s, self._launch_s, self._clock = request_s, launch_s, clock
        self._next_request, self._next_launch = 0.0, 0.0
        self._lock = threading.Lock()

    async def turn(self) -> None:
        """Wait for the next request's turn."""
        await asyncio.sleep(self.take())

    def take(self) -> float:
        """Take the next turn; seconds until it."""
        with self._lock:
            now = self._clock()
            at = max(now, self._next_request)
            self._next_request = at + self._request_s
        return at - now

    def may_launch(self) -> bool:
        """Whether a launch is allowed now; True takes its turn."""
        with self._lock:
            now = self._clock()
            if now < self._next_launch or now + self._request_s < self._next_request:
                return False
            self._next_launch = now + self._launch_s
        return True

    def note_launch(self) -> None:
        """A launch is sent now, which may be later than its turn was taken: the next one counts from here."""
        with self._lock:
            self._next_launch = max(self._next_launch, self._clock() + self._launch_s)

    def pause(self, seconds: float) -> None:
        """Send nothing for a while: the API answered that it was asked too often."""
        with self._lock:
            until = self._clock() + min(max(seconds, 0.0), _MAX_PAUSE_S)
            self._next_request = max(self._next_request, until)
            self._next_launch = max(self._next_launch, until)
