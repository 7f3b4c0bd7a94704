"""The times of a cron line: against a walk over every minute, over clocks that are put forward and back, and faults."""

from __future__ import annotations

import functools
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmaster.core.config.cron import MOST_WAITING, Schedule, parse_cron
from trainmaster.core.config.sweep import is_sweep, parse_sweep
from trainmaster.core.errors import SpecError
from trainmaster.core.schema import build

MINUTE = timedelta(minutes=1)
# Put forward and back at 02:00, at 01:00 UTC, by half an hour, at midnight, and not at all.
ZONES = ["America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "Africa/Cairo", "Asia/Kolkata", "UTC"]
CHANGES = {
    "America/New_York": [datetime(2026, 3, 8, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)],
    "Europe/Berlin": [datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC)],
    "Australia/Lord_Howe": [datetime(2026, 4, 4, tzinfo=UTC), datetime(2026, 10, 3, tzinfo=UTC)],
    "Africa/Cairo": [datetime(2026, 4, 23, tzinfo=UTC), datetime(2026, 10, 29, tzinfo=UTC)],
}


def schedule(cron: str, timezone: str = "UTC", **more: Any) -> Schedule:
    return build(Schedule, {"cron": cron, "timezone": timezone, **more})


def numbers(least: int, most: int) -> st.SearchStrategy[tuple[str, frozenset[int]]]:
    """A field, and the numbers it stands for, each written out by the rules of cron and not by the parser."""
    number = st.integers(least, most)
    single = number.map(lambda one: (str(one), frozenset({one})))
    every = st.just(("*", frozenset(range(least, most + 1))))
    stepped = st.integers(1, min(20, most - least)).map(lambda n: (f"*/{n}", frozenset(range(least, most + 1, n))))
    ranged = st.tuples(number, number, st.integers(1, 9)).map(
        lambda part: (
            f"{min(part[:2])}-{max(part[:2])}/{part[2]}",
            frozenset(range(min(part[:2]), max(part[:2]) + 1, part[2])),
        )
    )
    some = st.lists(st.one_of(single, ranged), min_size=1, max_size=3).map(
        lambda parts: (",".join(text for text, _ in parts), frozenset().union(*(found for _, found in parts)))
    )
    return st.one_of(every, stepped, some)


LINES = st.tuples(numbers(0, 59), numbers(0, 23), numbers(1, 31), numbers(1, 12), numbers(0, 6))


@functools.cache
def walk(zone: str, start: datetime, days: int) -> list[tuple[datetime, datetime, bool]]:
    """What a clock on the wall shows at every minute: instant, local time, and whether it shows it a second time.

    A minute that the clock skips is put where it would have been: so long behind the last one that was shown.
    """
    shown: list[tuple[datetime, datetime, bool]] = []
    seen: set[datetime] = set()
    last: datetime | None = None
    at = start - timedelta(days=1)
    while at < start + timedelta(days=days):
        local = at.astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0)
        skipped, instant = (last + MINUTE, at) if last is not None else (local, at)
        while skipped < local:
            shown.append((instant, skipped, False))
            skipped, instant = skipped + MINUTE, instant + MINUTE
        shown.append((at, local, local in seen))
        seen.add(local)
        last, at = local, at + MINUTE
    return shown


def expected(fields: list[frozenset[int]], line: str, zone: str, start: datetime, days: int) -> list[datetime]:
    minutes, hours, of_month, months, of_week = fields
    words = line.split()
    either = words[2][0] != "*" and words[4][0] != "*"
    found = set()
    for at, local, again in walk(zone, start, days):
        day = (local.day in of_month, (local.weekday() + 1) % 7 in of_week)
        if local.minute not in minutes or local.hour not in hours or local.month not in months:
            continue
        if (any(day) if either else all(day)) and (not again or len(hours) == 24):
            found.add(at)
    return sorted(at for at in found if start < at <= start + timedelta(days=days - 1))


def test_a_day_that_comes_once_in_eleven_or_forty_years_comes() -> None:
    sundays = schedule("0 0 */7 1 */7")  # 1, 8, 15, 22 or 29 January
    assert sundays.find_next(datetime(2026, 1, 1, tzinfo=UTC)) == datetime(2034, 1, 1, tzinfo=UTC)
    assert schedule("0 0 */28 2 */7").find_next(datetime(2089, 1, 1, tzinfo=UTC)) is not None
    leap = schedule("0 0 29 2 *").find_next(datetime(2096, 3, 1, tzinfo=UTC))
    assert leap == datetime(2104, 2, 29, tzinfo=UTC)


@pytest.mark.proof
@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(LINES, st.sampled_from(ZONES), st.integers(0, 1), st.integers(0, 1439))
def test_times_are_those_of_a_walk_over_every_minute(
    line: tuple[tuple[str, frozenset[int]], ...], zone: str, which: int, minute: int
) -> None:
    text, fields = " ".join(word for word, _ in line), [found for _, found in line]
    start = CHANGES.get(zone, [datetime(2028, 2, 28, tzinfo=UTC), datetime(2026, 12, 31, tzinfo=UTC)])[which]
    first = start - timedelta(days=1)
    wanted = [at for at in expected(fields, text, zone, first, 5) if at > start + MINUTE * minute]
    end = first + timedelta(days=4)
    # Every day of a year is some day on every day of the week; where both kinds are stated, that day alone is enough.
    longest = [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    either = text.split()[2][0] != "*" and text.split()[4][0] != "*"
    if not either and not any(day <= longest[month - 1] for day in fields[2] for month in fields[3]):
        with pytest.raises(SpecError, match="never comes"):
            schedule(text, zone)
        assert not wanted
        return
    made = schedule(text, zone)
    found, at = [], start + MINUTE * minute
    while (following := made.find_next(at)) is not None and following <= end and len(found) < 12:
        found.append(following)
        at = following
    assert found == wanted[:12]
    late = made.find_due(start + MINUTE * minute + MINUTE, end)
    assert late == wanted[-1:], "missed: once"
    all_of_them = schedule(text, zone, missed="all", overlap="queue").find_due(start + MINUTE * (minute + 1), end)
    assert all_of_them == wanted[-MOST_WAITING:]


@pytest.mark.parametrize(
    ("cron", "zone", "day", "wanted"),
    [
        ("30 2 * * *", "Europe/Berlin", (2026, 3, 29), ["01:30"]),  # skipped: 03:30 summer time
        ("30 2 * * *", "Europe/Berlin", (2026, 10, 25), ["00:30"]),  # doubled: the first
        ("*/30 2 * * *", "Europe/Berlin", (2026, 3, 29), ["01:00", "01:30"]),
        ("15 * * * *", "America/New_York", (2026, 11, 1), [f"{hour:02}:15" for hour in range(24)]),  # every real hour
        ("15 * * * *", "America/New_York", (2026, 3, 8), [f"{hour:02}:15" for hour in range(24)]),
        ("0 0 * * *", "Africa/Cairo", (2026, 4, 23), ["22:00"]),  # midnight does not exist: 01:00
    ],
)
def test_clocks_that_are_set(cron: str, zone: str, day: tuple[int, int, int], wanted: list[str]) -> None:
    start, found = datetime(*day, tzinfo=UTC), []
    at: datetime | None = start - MINUTE
    while at is not None and (at := schedule(cron, zone).find_next(at)) is not None and at < start + timedelta(days=1):
        found.append(f"{at:%H:%M}")
    assert found == wanted


def test_a_day_of_the_month_or_of_the_week() -> None:
    """POSIX: where both are stated either is enough; a star in front makes both needed."""
    days = {
        cron: [day for day in range(1, 31) if parse_cron(cron).fires_on(date(2026, 11, day))]
        for cron in ("0 0 13 * fri", "0 0 13 * *", "0 0 * * FRI", "0 0 */2 * 5", "0 0 1-7 * */7", "0 0 * * 7,fri-sun")
    }
    assert (
        days["0 0 13 * fri"] == [6, 13, 20, 27]
        and days["0 0 13 * *"] == [13]
        and days["0 0 * * FRI"] == [6, 13, 20, 27]
    )
    assert days["0 0 */2 * 5"] == [13, 27] and days["0 0 1-7 * */7"] == [1]
    assert days["0 0 * * 7,fri-sun"] == [1, 6, 7, 8, 13, 14, 15, 20, 21, 22, 27, 28, 29]


def test_rare_and_long_ones_are_quick_to_find() -> None:
    assert schedule("0 0 29 2 *").find_next(datetime(2026, 1, 1, tzinfo=UTC)) == datetime(2028, 2, 29, tzinfo=UTC)
    assert schedule("0 0 29 feb *").find_next(datetime(2096, 3, 1, tzinfo=UTC)) == datetime(2104, 2, 29, tzinfo=UTC)
    minutes = schedule("* * * * *", missed="all", overlap="queue")
    since, now = datetime(1999, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    assert minutes.find_due(since, now) == [now - MINUTE * n for n in reversed(range(MOST_WAITING))]
    assert schedule("* * * * *", missed="skip").find_due(since, now + MINUTE / 2) == [now]
    assert schedule("0 0 * * *", missed="skip").find_due(since, now + MINUTE) == [], "a minute late is missed"


@pytest.mark.parametrize(
    ("stated", "path", "words"),
    [
        ("0 3 * * *", "schedule", "write its times"),
        (None, "schedule", "write its times"),
        ({}, "schedule.cron", "missing"),
        ({"cron": "0 3 * * * *"}, "schedule.cron", "6 fields"),
        ({"cron": "60 3 * * *"}, "schedule.cron", "minute: '60' is not 0 to 59"),
        ({"cron": "0 24 * * *"}, "schedule.cron", "hour"),
        ({"cron": "0 3 0 * *"}, "schedule.cron", "day of the month"),
        ({"cron": "0 3 * foo *"}, "schedule.cron", "jan to dec"),
        ({"cron": "0 3 * * 8"}, "schedule.cron", "day of the week"),
        ({"cron": "0 3 5-1 * *"}, "schedule.cron", "ends before it begins"),
        ({"cron": "*/0 3 * * *"}, "schedule.cron", "a step of 1 or more"),
        ({"cron": "5/10 3 * * *"}, "schedule.cron", "a step of 1 or more goes with"),
        ({"cron": "0,,1 3 * * *"}, "schedule.cron", "is none of"),
        ({"cron": "*/90 * * * *"}, "schedule.cron", "minute: '*/90' has one time only, at 0"),
        ({"cron": "0 3 * * *", "timezone": "localtime"}, "schedule.timezone", "no time zone"),
        ({"cron": "0 0 30 2 *"}, "schedule.cron", "never comes"),
        ({"cron": "0 3 * * *\n"}, "schedule.cron", ""),
        ({"cron": "0 3 * * *", "timezone": "Mars/Base"}, "schedule.timezone", "no time zone"),
        ({"cron": "0 3 * * *", "timezone": "../../etc/passwd"}, "schedule.timezone", ""),
        ({"cron": "0 3 * * *", "missed": "all"}, "schedule.missed", "overlap: queue"),
        ({"cron": "0 3 * * *", "missed": "sometimes"}, "schedule.missed", ""),
        ({"cron": "0 3 * * *", "every": 1}, "schedule.every", ""),
    ],
)
def test_a_fault_is_named_by_its_place(stated: object, path: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_sweep({"name": "a", "command": ["x"], "schedule": stated})
    assert [fault.path for fault in refused.value.faults] == [path] and words in str(refused.value)


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"after": {"jobs": ["b"]}}, "after"),
        ({"search": {"parameters": {"env.A": ["1"]}, "sampler": "grid"}}, "schedule"),
        ({"matrix": {"env.A": [str(number) for number in range(101)]}}, "matrix"),
        ({"matrix": {}}, "matrix"),
        ({"matrix": {"workdir": ["/a", "/b"]}}, "matrix.workdir"),
        ({"name": "n" * 55}, "name"),
        ({"parallel": 0}, "parallel"),
    ],
)
def test_what_does_not_go_with_a_schedule(more: dict[str, Any], path: str) -> None:
    document = {"name": "a", "command": ["x"], "schedule": {"cron": "0 3 * * *"}}
    assert is_sweep(document) and [trial.spec.name for trial in parse_sweep(document).trials] == ["a-1"]
    with pytest.raises(SpecError) as refused:
        parse_sweep({**document, **more})
    assert [fault.path for fault in refused.value.faults] == [path]
