"""Schedules of sets: a row with the next time and with what begins then.

A time is taken in one transaction with the trials that begin: whoever moves `next_at` on has taken it, and nobody else
can. So a time that was reached has its trials once, whichever control plane dies when, and however many there are.
Rows are locked in one order: the schedule, then its set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from trainmaster.core.compat import parse_iso_time
from trainmaster.core.config.cron import Schedule
from trainmaster.core.schema import to_plain
from trainmaster.store import tables as t
from trainmaster.store.database import Database

Span = tuple[datetime, datetime]  # the first and the last of times that follow each other

KEPT = 200  # trials in the table of a set; the jobs of older ones stay, as jobs of their own
_S, _SETS, _TRIALS = t.schedules.c, t.job_sets.c, t.set_trials.c


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """A schedule, without what begins."""

    set_id: str
    schedule: Schedule
    next_at: datetime | None  # of one that is paused: the next one when it was
    paused: bool
    note: str
    decided: Sequence[Span] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DueRow:
    """A schedule whose next time is reached, with the values, the spec and the word of each trial."""

    set_id: str
    name: str
    schedule: Schedule
    next_at: datetime
    note: str
    trials: Sequence[Mapping[str, Any]]
    decided: Sequence[Span] = ()


def insert_schedule(
    conn: Connection,
    set_id: str,
    schedule: Schedule,
    trials: Sequence[Mapping[str, Any]],
    *,
    workdir: str | None,
    next_at: datetime | None,
) -> None:
    row = {
        "set_id": set_id, "schedule": to_plain(schedule), "trials": to_plain(trials), "workdir": workdir,
        "next_at": next_at, "paused": False, "begun": 0, "note": "",
    }  # fmt: skip
    conn.execute(insert(t.schedules).values(row))


def lock(conn: Connection, set_id: str) -> None:
    """Hold the row of a set's schedule, if it has one, until this transaction ends."""
    conn.execute(select(_S.set_id).where(_S.set_id == set_id).with_for_update())


def list_due(db: Database, now: datetime) -> list[DueRow]:
    columns = (_S.set_id, _SETS.name, _S.schedule, _S.next_at, _S.note, _S.trials, _S.decided)
    query = select(*columns).join(t.job_sets, _SETS.id == _S.set_id)
    rows = db.mappings(query.where(_S.next_at <= now, _S.paused.is_(False)).order_by(_S.next_at))
    return [DueRow(**{**row, **_parse(row)}) for row in rows]


def list_ahead(db: Database, after: datetime) -> list[ScheduleRow]:
    """Schedules that go on, and whose next time is later than this one."""
    rows = db.mappings(_ROWS.where(_S.next_at > after, _S.paused.is_(False)))
    return [_row(row) for row in rows]


def list_schedules(db: Database, set_ids: Sequence[str]) -> dict[str, ScheduleRow]:
    """Those of these sets that have a schedule."""
    rows = db.mappings(_ROWS.where(_S.set_id.in_(list(set_ids))))
    return {row["set_id"]: _row(row) for row in rows}


_ROWS = select(_S.set_id, _S.schedule, _S.next_at, _S.paused, _S.note, _S.decided)


def _row(row: RowMapping) -> ScheduleRow:
    return ScheduleRow(**{**row, **_parse(row)})


def _parse(row: RowMapping) -> dict[str, Any]:
    spans = [tuple(map(parse_iso_time, span)) for span in row["decided"] or ()]
    return {"schedule": _read(row["schedule"]), "decided": spans}


def _read(stored: Mapping[str, Any]) -> Schedule:
    """A schedule as it was submitted. It is not judged again: this machine may not have a zone that another had, and
    one such row must not hide all others."""
    return Schedule(**{field.name: stored[field.name] for field in fields(Schedule) if field.name in stored})


def take_time(conn: Connection, set_id: str, *, seen: datetime, next_at: datetime | None) -> bool:
    """Move on from the time that was seen; False where somebody has taken it, or it was paused or cancelled."""
    mine = (_S.set_id == set_id, _S.next_at == seen, _S.paused.is_(False))
    return conn.execute(update(t.schedules).where(*mine).values(next_at=next_at)).rowcount == 1


def keep_decided(conn: Connection, set_id: str, spans: Sequence[Span]) -> None:
    """These times are not to come again."""
    plain = [[first.isoformat(), last.isoformat()] for first, last in spans]
    conn.execute(update(t.schedules).where(_S.set_id == set_id).values(decided=plain))


def count_open(conn: Connection, set_id: str) -> tuple[int, int]:
    """Trials of a set that have not begun, and jobs of it that are not over."""
    waiting = select(func.count()).where(_TRIALS.set_id == set_id, _TRIALS.job_id.is_(None))
    going = (
        select(func.count())
        .select_from(t.set_trials.join(t.jobs, t.jobs.c.id == _TRIALS.job_id))
        .where(_TRIALS.set_id == set_id, t.jobs.c.stage.is_not(None))
    )
    return int(conn.execute(waiting).scalar_one()), int(conn.execute(going).scalar_one())


def take_numbers(conn: Connection, set_id: str, count: int) -> int:
    """The first of so many numbers for trials, none of which was ever used."""
    conn.execute(update(t.schedules).where(_S.set_id == set_id).values(begun=_S.begun + count))
    return int(conn.execute(select(_S.begun).where(_S.set_id == set_id)).scalar_one()) - count + 1


def insert_trials(conn: Connection, set_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Trials that begin as their turn comes. The oldest that are over leave the table."""
    conn.execute(insert(t.set_trials), [{"set_id": set_id, "job_id": None, **row} for row in rows])
    conn.execute(update(t.job_sets).where(_SETS.id == set_id).values(over=False))
    is_open = select(t.jobs.c.id).where(t.jobs.c.id == _TRIALS.job_id, t.jobs.c.stage.is_not(None)).exists()
    old = _TRIALS.number <= max(row["number"] for row in rows) - KEPT
    conn.execute(delete(t.set_trials).where(_TRIALS.set_id == set_id, old, _TRIALS.job_id.is_not(None), ~is_open))


def set_note(conn: Connection, set_id: str, note: str) -> None:
    conn.execute(update(t.schedules).where(_S.set_id == set_id, _S.note != note).values(note=note))


def pause(conn: Connection, set_id: str) -> None:
    conn.execute(update(t.schedules).where(_S.set_id == set_id).values(paused=True))


def go_on(conn: Connection, set_id: str, next_at: datetime | None) -> None:
    conn.execute(update(t.schedules).where(_S.set_id == set_id).values(next_at=next_at, paused=False))


def end(conn: Connection, set_id: str) -> None:
    """No further time comes: its set is cancelled."""
    conn.execute(update(t.schedules).where(_S.set_id == set_id).values(next_at=None, paused=False))
