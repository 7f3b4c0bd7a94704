"""`schedule:` of a spec: when its runs begin, by a cron line of five fields in a time zone.

    schedule: {cron: "0 3 * * mon-fri", timezone: Europe/Berlin}

Times are local. One that the clock skips comes as much later as the clock was put forward (02:30 at 03:30); one that
comes twice counts the first time, unless the hour is `*`: then both times. The first two rules are those of RFC 5545.
"""

from __future__ import annotations

import functools
import re
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo
from typing import Literal

from trainmaster.core.compat import UTC
from trainmaster.core.errors import Fault
from trainmaster.core.schema import field

MOST_WAITING = 100  # runs of a schedule that have not begun
LATE = timedelta(minutes=1)  # a time that nobody has taken by then was missed
_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
_WEEKDAYS = "sun mon tue wed thu fri sat".split()
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of the month", 1, 31, {}),
    ("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)}),
    ("day of the week", 0, 7, {name: number for number, name in enumerate(_WEEKDAYS)}),
)
_PART = re.compile(r"(?:\*|(?P<low>\w+)(?:-(?P<high>\w+))?)(?:/(?P<step>\d{1,2}))?", re.ASCII)
_MOST_DAYS = 366 * 41  # 29 February on a Sunday may be 40 years away: 2088, 2128
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron:
    """The times of day and the days of a cron line."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # 0 is Sunday
    either: bool  # both kinds of days are stated, and one of them is enough

    def fires_on(self, day: date) -> bool:
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return day.month in self.months and (of_month or of_week if self.either else of_month and of_week)


@functools.lru_cache(maxsize=64)  # a schedule of every minute asks for the same three days 1,440 times
def list_day(cron: Cron, day: date, zone: tzinfo) -> frozenset[datetime]:
    """Every time of one local day, in UTC."""
    found: set[datetime] = set()
    if not cron.fires_on(day):
        return frozenset()
    for hour in cron.hours:
        for minute in cron.minutes:
            local = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)
            found.add(local.astimezone(UTC))
            again = local.replace(fold=1)
            if len(cron.hours) == 24 and _offset(again) < _offset(local):
                found.add(again.astimezone(UTC))
    return frozenset(found)


def parse_cron(text: str) -> Cron:
    """The times of a cron line; ValueError with what is wrong."""
    words = text.split()
    if len(words) != len(_FIELDS):
        raise ValueError(f"has {len(words)} fields; write five: minute, hour, day of the month, month, day of the week")
    minutes, hours, days, months, weekdays = (
        _parse_field(word.lower(), *of) for word, of in zip(words, _FIELDS, strict=True)
    )
    return Cron(
        minutes=tuple(sorted(minutes)),
        hours=tuple(sorted(hours)),
        days=frozenset(days),
        months=frozenset(months),
        weekdays=frozenset(number % 7 for number in weekdays),
        either=not words[2].startswith("*") and not words[4].startswith("*"),
    )


def _parse_field(word: str, name: str, least: int, most: int, names: dict[str, int]) -> set[int]:
    found: set[int] = set()
    for part in word.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{name}: {part!r} is none of *, a number, a range as 1-5, each with a step as */15")
        low, high, step = (match[key] for key in ("low", "high", "step"))
        if step is not None and (int(step) == 0 or (low is not None and high is None)):
            raise ValueError(f"{name}: {part!r}: a step of 1 or more goes with * or with a range, as {least}-{most}/5")
        if step is not None and low is None and int(step) > most - least:
            raise ValueError(
                f"{name}: {part!r} has one time only, at {least}: write {least}, or a step up to {most - least}"
            )
        first = least if low is None else _number(low, name, least, most, names)
        last = most if low is None else first if high is None else _number(high, name, least, most, names)
        if last == 0 < first and name == _FIELDS[4][0]:  # fri-sun
            last = 7
        if last < first:
            raise ValueError(f"{name}: {part!r} ends before it begins")
        found.update(range(first, last + 1, int(step or 1)))
    return found


def _number(word: str, name: str, least: int, most: int, names: dict[str, int]) -> int:
    number = names.get(word, int(word) if word.isdecimal() and len(word) <= 2 else -1)
    if not least <= number <= most:
        known = f", or {next(iter(names))} to {list(names)[-1]}" if names else ""
        raise ValueError(f"{name}: {word!r} is not {least} to {most}{known}")
    return number


def _offset(local: datetime) -> timedelta:
    return local.utcoffset() or timedelta()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When the runs of a spec begin. The server begins them, for every target alike."""

    cron: str = field(
        pattern=r"[A-Za-z0-9*,/ -]{9,200}",
        allowed="five fields with a space between two: minute, hour, day of the month, month, day of the week",
        example="0 3 * * *",
        doc="five fields: minute, hour, day of the month, month, day of the week, each `*`, numbers, names (mon, jan), "
        "ranges (mon-fri), lists (1,15) and steps (*/15). Where both kinds of days are stated, either is enough",
    )
    timezone: str = field(
        default="UTC", pattern=r"[A-Za-z0-9_+/-]{1,64}", example="Europe/Berlin", doc="zone of these times"
    )
    missed: Literal["once", "skip", "all"] = field(
        default="once",
        doc="times at which no server ran: once: one run for the newest of them; skip: none; all: a run for each, "
        "one after the other, at most 100",
    )
    overlap: Literal["skip", "queue"] = field(
        default="skip",
        doc="a time at which the run before is not over: skip: no run; queue: it waits for that one's end, at most 100",
    )

    def faults(self) -> Iterator[Fault]:
        known = list_zones()
        if known and self.timezone not in known:
            message = f"{self.timezone!r} is no time zone; write for example Europe/Berlin or UTC"
            yield Fault(path="timezone", message=message)
        if self.missed == "all" and self.overlap == "skip":
            yield Fault(path="missed", message="all makes up for one time after the other: write overlap: queue too")
        try:
            times = parse_cron(self.cron)
        except ValueError as error:
            yield Fault(path="cron", message=str(error))
            return
        if not _comes(times):
            yield Fault(path="cron", message="never comes: no year has such a day")

    @property
    def text(self) -> str:
        return f"{' '.join(self.cron.split())} {self.timezone}"

    @property
    def zone(self) -> tzinfo:
        return zoneinfo.ZoneInfo(self.timezone)

    def find_next(self, after: datetime) -> datetime | None:
        """The first time behind this one, in UTC; None: there is none in 40 years."""
        cron, zone = parse_cron(self.cron), self.zone
        day = after.astimezone(zone).date() - _DAY
        found: datetime | None = None
        for _ in range(_MOST_DAYS):
            times = [time for time in list_day(cron, day, zone) if time > after]
            if found is not None:  # a day further: a doubled hour at midnight belongs to two days
                return min([found, *times])
            found = min(times, default=None)
            day += _DAY
        return found

    def find_due(self, since: datetime, now: datetime) -> list[datetime]:
        """The times from `since` to now that get a run, by the rule for missed ones."""
        most = MOST_WAITING if self.missed == "all" else 1
        times = self._list_newest(since, now, most)
        return [time for time in times if now - time < LATE] if self.missed == "skip" else times

    def _list_newest(self, since: datetime, until: datetime, most: int) -> list[datetime]:
        """The newest times of a span, walked backwards: it may be years of minutes."""
        cron, zone = parse_cron(self.cron), self.zone
        day, first = until.astimezone(zone).date() + _DAY, since.astimezone(zone).date() - _DAY
        found: set[datetime] = set()
        enough = False
        while day >= first and not enough:
            enough = len(found) >= most
            found |= {time for time in list_day(cron, day, zone) if since <= time <= until}
            day -= _DAY
        return sorted(found)[-most:]


@functools.lru_cache(maxsize=64)  # a spec is rebuilt with every row
def _comes(cron: Cron) -> bool:
    first = date(2024, 1, 1)  # any day: what is right today is right when its row is read
    return any(cron.fires_on(first + _DAY * number) for number in range(_MOST_DAYS))


@functools.cache
def list_zones() -> frozenset[str]:
    """Every zone that has one name everywhere; reading them walks a folder, and a spec is rebuilt with every row."""
    return frozenset(zoneinfo.available_timezones() - {"localtime", "posixrules", "Factory"})
