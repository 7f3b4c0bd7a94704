"""Pauses between looks at what a test waits for, ever longer: a look is often an SSH request or a program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator


def rests(first_s: float = 0.02, *, most_s: float = 0.2) -> Iterator[float]:
    """Without an end: a limit is the test's own."""
    for number in itertools.count():
        yield min(most_s, first_s * 1.3 ** min(number, 30))
