"""Schedules: begin what is due, pause one, let it go on.

At a time of its schedule a set gets new trials, in one transaction with the move to the next time
(store/capacity/schedules.py). From there they are trials as any other: sets.py makes each one job.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from trainmaster.control import failpoints
from trainmaster.control.submit import LOCAL
from trainmaster.core.config.cron import LATE, MOST_WAITING, Schedule
from trainmaster.core.errors import UsageError
from trainmaster.store import audit
from trainmaster.store.capacity import schedules, sets
from trainmaster.store.capacity.schedules import DueRow, ScheduleRow, Span
from trainmaster.store.database import Connection, Database

TIME_VARIABLE = "TRAINMASTER_SCHEDULED_AT"  # of every run: the time that it stands for, with its offset
COLUMN = "scheduled for"  # in the table of results; no variable of a matrix has a space in its name

CLOCKS = timedelta(hours=1)  # by which the clocks of two servers may differ
_MOST_SPANS = 100  # of decided times; a new one begins where times were missed or a clock was set

log = logging.getLogger(__name__)


def begin_due(db: Database, *, now: datetime) -> None:
    """Begin the trials of every schedule whose time is reached. What goes wrong with one holds up no other."""
    for row in schedules.list_due(db, now):
        try:
            _begin(db, row, now)
        except Exception as error:
            text = f"the schedule cannot go on: {type(error).__name__}: {error}"[:500]
            if text != row.note:  # once, and not at every tick
                log.exception("schedule of set %s; trying again", row.set_id)
            with db.write() as conn:
                schedules.set_note(conn, row.set_id, text)


def _begin(db: Database, row: DueRow, now: datetime) -> None:
    times = [time for time in row.schedule.find_due(row.next_at, now) if not _is_decided(row.decided, time)]
    next_at = _find_next(row.schedule, row.decided, now)
    with failpoints.around("commit scheduled", row.set_id), db.write() as conn:
        if not schedules.take_time(conn, row.set_id, seen=row.next_at, next_at=next_at):
            return
        begun, note = _choose(conn, row, times)
        # Of times that passed long ago only those with a run: a clock that is ahead may have skipped the others.
        in_time = [row.next_at] if now - row.next_at < LATE else []
        schedules.keep_decided(conn, row.set_id, _decide(row, [*in_time, *begun]))
        if begun:
            first = schedules.take_numbers(conn, row.set_id, len(begun) * len(row.trials))
            schedules.insert_trials(conn, row.set_id, list(_make_trials(row, begun, first)))
        schedules.set_note(conn, row.set_id, note)


def put_back(db: Database, *, now: datetime) -> None:
    """Find the next time again of schedules that wait for one too far ahead: a clock was, and is right again."""
    for row in schedules.list_ahead(db, now + CLOCKS):
        with contextlib.suppress(ValueError, KeyError):  # no such zone here: `begin_due` says so at its time
            latest, next_at = row.schedule.find_next(now + CLOCKS), _find_next(row.schedule, row.decided, now)
            if latest is None or row.next_at is None or next_at is None:
                continue
            if row.next_at > latest and row.next_at > next_at:
                with db.write() as conn:
                    schedules.take_time(conn, row.set_id, seen=row.next_at, next_at=next_at)
                log.warning("schedule of set %s waited for %s; a clock was ahead", row.set_id, row.next_at)


def _is_decided(decided: Sequence[Span], time: datetime) -> bool:
    return any(first <= time <= last for first, last in decided)


def _decide(row: DueRow, times: Sequence[datetime]) -> list[Span]:
    """The spans of times that are not to come again, with these."""
    spans = list(row.decided)
    for time in sorted(times):
        if _is_decided(spans, time):
            continue
        if spans and row.schedule.find_next(spans[-1][1]) == time:
            spans[-1] = (spans[-1][0], time)
        else:
            spans.append((time, time))
    return spans[-_MOST_SPANS:]


def _find_next(schedule: Schedule, decided: Sequence[Span], after: datetime) -> datetime | None:
    """The first time behind this one that is not decided yet."""
    time = schedule.find_next(after)
    while time is not None and (ends := [last for first, last in decided if first <= time <= last]):
        time = schedule.find_next(max(ends))
    return time


def _choose(conn: Connection, row: DueRow, times: Sequence[datetime]) -> tuple[Sequence[datetime], str]:
    """Those of the times that get a run, and what to say of the others."""
    waiting, going = schedules.count_open(conn, row.set_id)
    room = (MOST_WAITING - waiting) // len(row.trials)
    since = _show(row.schedule, row.next_at)
    if not times and _is_decided(row.decided, row.next_at):
        return (), f"no run for {since}: it has had one; a clock was set back"
    if not times:
        return (), f"no run for {since}: no server ran then (missed: skip)"
    if row.schedule.overlap == "skip" and waiting + going:
        return (), f"no run for {_show(row.schedule, times[-1])}: the one before is not over (overlap: skip)"
    if room < len(times):
        return times[len(times) - max(room, 0) :], f"times since {since} got no run: {waiting} runs wait already"
    if times[0] > row.next_at:
        return times, f"times since {since} got no run of their own: no server ran then (missed: {row.schedule.missed})"
    return times, ""


def _make_trials(row: DueRow, times: Sequence[datetime], first: int) -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    for time in times:
        shown = _show(row.schedule, time)
        for trial in row.trials:
            number = first + len(made)
            spec = trial["spec"]
            spec = {**spec, "name": f"{row.name}-{number}", "env": {**spec["env"], TIME_VARIABLE: shown}}
            values = {COLUMN: shown, **trial["values"]}
            made.append({"number": number, "values": values, "spec": spec, "word": trial["word"]})
    return made


def pause(db: Database, set_id: str, *, by: str = LOCAL) -> None:
    """No time comes until it goes on; runs that have begun are not stopped. UsageError where there is no schedule."""
    _change(db, set_id, None, by=by)


def go_on(db: Database, set_id: str, *, now: datetime, by: str = LOCAL) -> None:
    """The next time from now on counts; those during the pause were not missed."""
    _change(db, set_id, now, by=by)


def _change(db: Database, set_id: str, now: datetime | None, *, by: str) -> None:
    found, row = schedules.list_schedules(db, [set_id]).get(set_id), sets.find_set(db, set_id)
    if found is None or row is None:
        raise UsageError(f"set {set_id} has no schedule: its runs begin once")
    with failpoints.around("commit pause"), db.write() as conn:
        # Locks the row of the schedule: a cancel that is being written is waited for, a later one comes after this.
        if now is None:
            schedules.pause(conn, set_id)
        else:
            schedules.go_on(conn, set_id, _next_after(found, now))
        if sets.is_cancelled(conn, set_id):
            raise UsageError(f"set {set_id} is cancelled; submit it again")
        action = "set.pause" if now is None else "set.resume"
        audit.record(conn, who=by, action=action, subject=f"set:{set_id}")


def _next_after(row: ScheduleRow, now: datetime) -> datetime | None:
    """The next time of a schedule that goes on: none that was taken by a server whose clock is ahead of ours."""
    next_at, latest = _find_next(row.schedule, row.decided, now), row.schedule.find_next(now + CLOCKS)
    if next_at is None or latest is None or row.next_at is None or not next_at < row.next_at <= latest:
        return next_at
    return row.next_at


def _show(schedule: Schedule, time: datetime) -> str:
    """A time in the zone of the schedule, with its offset: of a doubled hour it says which."""
    return time.astimezone(schedule.zone).isoformat(timespec="minutes")
