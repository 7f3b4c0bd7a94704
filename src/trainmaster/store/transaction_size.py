"""Lines of one write transaction, chosen by time: other writers wait for it, so slow lines come in smaller ones.

A line that becomes a record costs ten times a plain one, and a loaded machine makes both slower: a fixed number of
lines bounds neither. The commit itself is left out of the measure: its fsync costs the same for one line as for many.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

MOST_LINES = 2000
FEWEST_LINES = 25
TARGET_S = 0.05  # of work in one transaction; a fifth of the longest wait that other writers should meet


class TransactionSize:
    """Number of lines for the next transaction, from the time that the last one took for each of its lines."""

    def __init__(self) -> None:
        self.lines = 4 * FEWEST_LINES

    @contextlib.contextmanager
    def measure(self, lines: int) -> Iterator[None]:
        """Time the work of one transaction of so many lines; the commit comes after it."""
        began = time.monotonic()
        yield
        self.adapt(lines, time.monotonic() - began)

    def adapt(self, lines: int, took_s: float) -> None:
        """Shrink at once to what fits the target; double where twice as many would fit."""
        fitting = int(lines * TARGET_S / took_s) if took_s > 0 else 2 * MOST_LINES
        if took_s > TARGET_S:
            self.lines = max(FEWEST_LINES, min(fitting, self.lines))
        elif fitting >= 2 * self.lines:  # few lines say little: the fixed cost of a transaction counts for most of them
            self.lines = min(2 * self.lines, MOST_LINES)
