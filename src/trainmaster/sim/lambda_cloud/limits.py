"""Rate limits of the API, in simulated time, and the count of requests that broke them."""

from __future__ import annotations

from trainmaster.core.vendors.lambda_api import LAUNCH_INTERVAL_S, REQUEST_INTERVAL_S

_TOLERANCE = 0.1  # of the interval: a client that keeps the limit is not refused for the jitter of its network
_JITTER_REAL_S = 0.05
_JITTER_FAST_REAL_S = 0.25  # intervals of milliseconds: a loaded machine delivers what was sent in turns at once


class Limit:
    """At most one request per interval on average. A refused request does not count against the next."""

    def __init__(self, interval_s: float, *, factor: float) -> None:
        self._interval_s = interval_s
        jitter_s = _JITTER_REAL_S if factor <= 1 else _JITTER_FAST_REAL_S
        self._tolerance_s = _TOLERANCE * interval_s + jitter_s * factor
        self._next_s = 0.0
        self.violations = 0

    def allows(self, now_s: float) -> bool:
        if now_s < self._next_s - self._tolerance_s:
            self.violations += 1
            return False
        self._next_s = max(now_s, self._next_s) + self._interval_s
        return True


class Limits:
    """The vendor's two limits: all requests, and launches."""

    def __init__(self, *, factor: float) -> None:
        self.requests = Limit(REQUEST_INTERVAL_S, factor=factor)
        self.launches = Limit(LAUNCH_INTERVAL_S, factor=factor)

    def allows(self, *, launch: bool, now_s: float) -> bool:
        return self.requests.allows(now_s) and (not launch or self.launches.allows(now_s))
