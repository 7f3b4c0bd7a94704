"""Sums of ledgers: GPU-time and money by bin, cut at the ends of months (UTC), and the two ratios of the field.

ETTR (Kokolis et al., arXiv 2410.21680): productive time over the time from submission on, queue included. Work done a
second time, starts and stalls are not productive.
ML productivity goodput (Google, arXiv 2502.06982): scheduling (held over wanted) × runtime (productive over held) ×
program (ideal over actual time of the productive part; here the MFU against the datasheet).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from trainmaster.core.compat import UTC
from trainmaster.core.money.cost import Span, month_of
from trainmaster.core.money.goodput.bins import PRODUCTIVE, Bin
from trainmaster.core.money.goodput.history import to_us
from trainmaster.core.money.goodput.ledger import Ledger

_HOUR_US = 3_600_000_000
_BINS = tuple(Bin)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Tally:
    """GPU-time and money by bin. Times are GPU-microseconds, whole and exact; money is in cents."""

    gpu_us: dict[Bin, int] = field(default_factory=lambda: dict.fromkeys(_BINS, 0))
    cents: dict[Bin, float] = field(default_factory=lambda: dict.fromkeys(_BINS, 0.0))
    ideal_us: float = 0.0  # GPU-time that the same work would take at the datasheet's peak
    measured_us: int = 0  # GPU-time for which that is known
    jobs: int = 0
    unpriced_jobs: int = 0  # whose money is not known, or not all of it

    def add(self, other: Tally) -> None:
        for bin_ in _BINS:  # walking the enum itself takes three times as long
            self.gpu_us[bin_] += other.gpu_us[bin_]
            self.cents[bin_] += other.cents[bin_]
        self.ideal_us += other.ideal_us
        self.measured_us += other.measured_us
        self.jobs += other.jobs
        self.unpriced_jobs += other.unpriced_jobs

    @property
    def total_us(self) -> int:
        return sum(self.gpu_us.values())

    @property
    def productive_us(self) -> int:
        return sum(self.gpu_us[bin_] for bin_ in PRODUCTIVE)

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio, at least; None before any time has passed."""
        return _ratio(self.productive_us, self.total_us)

    @property
    def ettr_most(self) -> float | None:
        """The same if all that is unknown were productive."""
        return _ratio(self.productive_us + self.gpu_us[Bin.UNKNOWN], self.total_us)

    @property
    def scheduling(self) -> float | None:
        return _ratio(self.total_us - self.gpu_us[Bin.QUEUED], self.total_us)

    @property
    def runtime(self) -> float | None:
        return _ratio(self.productive_us, self.total_us - self.gpu_us[Bin.QUEUED])

    @property
    def program(self) -> float | None:
        """Mean MFU of the steps for which it is known; None where it is of none."""
        return self.ideal_us / self.measured_us if self.measured_us else None

    @property
    def mpg(self) -> float | None:
        parts = (self.scheduling, self.runtime, self.program)
        product = 1.0
        for part in parts:
            if part is None:
                return None
            product *= part
        return product


def fold(
    ledger: Ledger, *, charges: Mapping[int, Sequence[Span]], priced: bool, now: datetime, month: str | None = None
) -> dict[str, Tally]:
    """The tallies of one job by month (2026-11), or of one month alone. `charges` are by attempt number.

    Money is counted while a charge runs. A machine that was still there outside the segments of its attempt cost money
    for nothing: that part is in the bin `idle`.
    """
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    costs = {number: _Meter(spans, now) for number, spans in charges.items()} if priced else {}
    last_month, low_us, high_us = "", 0, 0
    for start, end, bin_, number in ledger.segments:
        at = start
        while at < end:
            if not low_us <= at < high_us:
                last_month, low_us, high_us = _month_at(at)
            until = min(end, high_us)
            tally = tallies[last_month]
            tally.gpu_us[bin_] += (until - at) * ledger.gpus
            if (meter := costs.get(number)) is not None:
                tally.cents[bin_] += meter.take(at, until, last_month)
            at = until
    for meter in costs.values():
        for name, cents in meter.left():
            tallies[name].cents[Bin.IDLE] += cents
    for reading in ledger.readings:
        name = _month_at(reading.at)[0]
        if name in tallies:
            tallies[name].ideal_us += reading.mfu * reading.lasted * ledger.gpus
            tallies[name].measured_us += reading.lasted * ledger.gpus
    for tally in tallies.values():
        tally.jobs, tally.unpriced_jobs = 1, int(not priced)
    return dict(tallies) if month is None else {name: tally for name, tally in tallies.items() if name == month}


class _Meter:
    """What the charges of one attempt come to in an interval, and what no interval has taken."""

    def __init__(self, spans: Sequence[Span], now: datetime) -> None:
        self._spans = [
            (
                to_us(span.start),
                to_us(span.end if span.end is not None else now),
                (span.cents_per_hour or 0.0) / _HOUR_US,
            )
            for span in spans
        ]
        self._taken: dict[str, float] = {}

    def take(self, start: int, end: int, month: str) -> float:
        cents = sum(max(0, min(end, high) - max(start, low)) * rate for low, high, rate in self._spans)
        self._taken[month] = self._taken.get(month, 0.0) + cents
        return cents

    def left(self) -> Iterator[tuple[str, float]]:
        whole: dict[str, float] = {}
        for low, high, rate in self._spans:
            at = low
            while at < high:
                name, _, end = _month_at(at)
                whole[name] = whole.get(name, 0.0) + (min(high, end) - at) * rate
                at = min(high, end)
        for name, cents in whole.items():
            rest = cents - self._taken.get(name, 0.0)
            if rest > 1e-6 * max(1.0, cents):  # less is rounding
                yield name, rest


def _month_at(us: int) -> tuple[str, int, int]:
    """The calendar month of a time, in UTC: its name, its start and its end."""
    window = month_of(_EPOCH + timedelta(microseconds=us))
    return f"{window.start:%Y-%m}", to_us(window.start), to_us(window.end)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
