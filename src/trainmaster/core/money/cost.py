"""Costs from prices and times. Cents throughout; nothing is rounded before it is shown.

An unknown price makes an unknown cost, never zero. An `Amount` keeps the known part and the number of unknown parts,
so that a sum can be shown as "at least this much, and N parts unknown".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from trainmaster.core.compat import UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From a time up to, and without, another."""

    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A resource paid by the hour, from `start` until `end` or still. Without a price its cost is unknown."""

    cents_per_hour: float | None
    start: datetime
    end: datetime | None = None

    def seconds(self, *, now: datetime, window: Window | None = None) -> float:
        start, end = self.start, self.end if self.end is not None else now
        if window is not None:
            start, end = max(start, window.start), min(end, window.end)
        return max(0.0, (end - start).total_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A sum of money of which parts may be unknown."""

    known_cents: float = 0.0
    unknown: int = 0  # parts without a known price

    @property
    def cents(self) -> float | None:
        """The whole, where every part is known."""
        return None if self.unknown else self.known_cents

    def __add__(self, other: Amount) -> Amount:
        return Amount(known_cents=self.known_cents + other.known_cents, unknown=self.unknown + other.unknown)


def add_up(spans: Iterable[Span], *, now: datetime, window: Window | None = None) -> Amount:
    """Cost of these up to now, or in a window. One outside the window does not count."""
    known, unknown = [], 0
    for span in spans:
        seconds = span.seconds(now=now, window=window)
        if window is not None and seconds == 0:
            continue
        if span.cents_per_hour is None:
            unknown += 1
        else:
            known.append(span.cents_per_hour * seconds / 3600)
    return Amount(known_cents=math.fsum(known), unknown=unknown)


def burn(spans: Iterable[Span]) -> float:
    """Cents an hour of those that go on, as far as their prices are known."""
    return math.fsum(span.cents_per_hour for span in spans if span.end is None and span.cents_per_hour is not None)


def reached_at(cap_cents: float, *, spent_cents: float, cents_per_hour: float, now: datetime) -> datetime | None:
    """When spending comes to the cap if all goes on as it does; None for never, or not in a lifetime."""
    if spent_cents >= cap_cents:
        return now
    if cents_per_hour <= 0:
        return None
    hours = (cap_cents - spent_cents) / cents_per_hour
    return now + timedelta(hours=hours) if hours < 1_000_000 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Progress at a time, in steps or epochs."""

    at: datetime
    done: float


def left_s(marks: Iterable[Mark], total: float | None, *, now: datetime) -> float | None:
    """Seconds from now until the total, at the pace between the first mark and the last; None where that is unknown.

    From mark to mark and not from the time of one step: saving and evaluating are paid for too.
    """
    known = sorted(marks, key=lambda mark: (mark.at, mark.done))
    if total is None or len(known) < 2:
        return None
    first, last = known[0], known[-1]
    took_s = (last.at - first.at).total_seconds()
    if last.done <= first.done or took_s <= 0:
        return None
    needed_s = max(0.0, total - last.done) * took_s / (last.done - first.done)
    return max(0.0, needed_s - max(0.0, (now - last.at).total_seconds()))


def forecast(spent: Amount, *, cents_per_hour: float, left_s: float | None) -> float | None:
    """Forecast cost at the end; None where the cost so far or the remaining time is unknown."""
    if spent.cents is None or left_s is None:
        return None
    return spent.cents + cents_per_hour * left_s / 3600


def month_of(when: datetime) -> Window:
    """The calendar month of a time, in UTC."""
    when = when.astimezone(UTC)
    start = datetime(when.year, when.month, 1, tzinfo=UTC)
    following = datetime(when.year + when.month // 12, when.month % 12 + 1, 1, tzinfo=UTC)
    return Window(start=start, end=following)


def dollars(cents: float | None) -> str:
    """An amount for people: "$12.34", "under $0.01" where it is something, "unknown" where it is."""
    if cents is None:
        return "unknown"
    return "under $0.01" if 0 < cents < 1 else f"${cents / 100:,.2f}"
