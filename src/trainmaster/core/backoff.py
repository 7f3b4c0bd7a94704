"""Exponential back-off with jitter."""

from __future__ import annotations

import math
import random

_MAX_DOUBLINGS = 60  # beyond it the power would overflow a float; every caller's limit is reached long before


def backoff_s(failures: int, *, first_s: float, longest_s: float = math.inf, jitter: bool = True) -> float:
    """Seconds to wait after this many failures in a row (1, 2, …): doubled each time, at most `longest_s`.

    Jitter takes up to half off: clients that failed together must not come back together. Ranks that retry in step
    need none, as each would wait for the slowest.
    """
    limit_s = min(first_s * 2.0 ** min(max(failures - 1, 0), _MAX_DOUBLINGS), longest_s)
    return limit_s * random.uniform(0.5, 1.0) if jitter else limit_s  # noqa: S311 (spreads load, not a secret)
