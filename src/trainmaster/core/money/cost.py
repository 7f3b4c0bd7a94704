"""Costs from prices and times. Cents throughout; nothing is rounded before it is shown.

An unknown price makes an unknown cost, never zero. An `Amount` keeps the known part and the number of unknown parts,
so that a sum can be shown as "at least this much, and N parts unknown".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import overload

from trainmaster.core.compat import UTC

BOUNDS = {"timeout_s": "its time limit", "max_cost": "its limits.max_cost"}  # what a forecast without a pace is made of
Cents = int | float  # as `round_cents` gives them: whole from one cent on


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


def reached_by(
    cap_cents: float, *, spent_cents: float, going: Iterable[tuple[float, float]], now: datetime
) -> datetime | None:
    """When spending comes to the cap where each of these ends; None for never, or not in a lifetime.

    `going`: cents an hour, and seconds until the end, infinite where that is unknown.
    """
    spent, at_s = spent_cents, 0.0
    open_ends = sorted((ends_s, rate) for rate, ends_s in going if rate > 0)
    for place, (ends_s, _) in enumerate(open_ends):
        rate = math.fsum(each for _, each in open_ends[place:])
        when = reached_at(cap_cents, spent_cents=spent, cents_per_hour=rate, now=now + timedelta(seconds=at_s))
        if when is None or when <= now + timedelta(seconds=min(ends_s, 4e9)):
            return when
        spent, at_s = spent + rate * (ends_s - at_s) / 3600, ends_s
    return now if spent_cents >= cap_cents else None


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


def forecast(
    spent: Amount,
    *,
    cents_per_hour: float,
    left_s: float | None,
    timeout_s: float | None = None,
    cap_cents: float | None = None,
    earlier_cents: float = 0.0,
) -> float | None:
    """Forecast cost at the end; None where the cost so far is unknown, or nothing says when the job ends.

    It ends when it is done, and earlier where `timeout_s` ends its attempt or its own cap is reached, towards which
    the other jobs of its run count too (`earlier_cents`).
    """
    if spent.cents is None:
        return None
    if cents_per_hour <= 0 and left_s is None:
        return None
    ends_s = min((seconds for seconds in (left_s, timeout_s) if seconds is not None), default=None)
    ahead = cents_per_hour * ends_s / 3600 if ends_s is not None else None
    if cap_cents is not None:
        left = max(0.0, cap_cents - earlier_cents - spent.cents)
        ahead = left if ahead is None else min(ahead, left)
    return spent.cents + ahead if ahead is not None else None


def say_at_end(cents: float | None, bound: str | None) -> str:
    """What a job will have cost, for people: from its pace, or where only its limits are known, at most so much."""
    if bound is None:
        return f"about {dollars(cents)} at the end"
    return f"at most {dollars(cents)} ({BOUNDS.get(bound, bound)})"


def month_of(when: datetime) -> Window:
    """The calendar month of a time, in UTC."""
    when = when.astimezone(UTC)
    start = datetime(when.year, when.month, 1, tzinfo=UTC)
    following = datetime(when.year + when.month // 12, when.month % 12 + 1, 1, tzinfo=UTC)
    return Window(start=start, end=following)


@overload
def round_cents(cents: float) -> Cents: ...
@overload
def round_cents(cents: float | None) -> Cents | None: ...
def round_cents(cents: float | None) -> Cents | None:
    """Whole cents, rounded once, here. An amount under one cent keeps its parts: rounded to 0 it would read as free."""
    if cents is None:
        return None
    return max(1e-6, round(cents, 6)) if 0 < cents < 1 else round(cents)


def submitter(name: str | None) -> str:
    """Who submitted a job, for people. Nobody is named where the server's own user did, whom the audit log calls so."""
    return name or "local"


def spent_words(cents: float | None, *, final: bool) -> str:
    """What a job has cost, for people: a job that is over costs nothing more."""
    return f"{dollars(cents)} {'in all' if final else 'so far'}"


def price_words(cents_per_hour: float | None, cents: float | None, *, final: bool) -> str:
    """The price of a job for all its machines and what it has cost, for people."""
    price = f"{dollars(cents_per_hour)} an hour" if cents_per_hour is not None else "unknown"
    return f"{price}, {spent_words(cents, final=final)}" if cents or cents_per_hour is not None else price


def dollars(cents: float | None) -> str:
    """An amount for people: "$12.34", "under $0.01" where it is something, "unknown" where it is."""
    if cents is None:
        return "unknown"
    return "under $0.01" if 0 < cents < 1 else f"${cents / 100:,.2f}"
