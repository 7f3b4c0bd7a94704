"""Schedules after a clock was wrong, and beside a cancel."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import pytest

from trainmaster.control.queueing import schedules, sets
from trainmaster.store.capacity import schedules as store
from trainmaster.store.capacity import sets as store_sets
from trainmaster.store.capacity.sets import SetRow
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

from .test_schedules import DAY, HOUR, begun, end_all, submit, tick

pytestmark = pytest.mark.both_databases


def test_times_before_one_that_was_run_by_a_clock_ahead_have_their_runs(db: Database) -> None:
    """The clock is over a day ahead for an hour, and runs the time of the next day; that of today is still to come."""
    row, first = submit(db, schedule={"overlap": "queue"})
    start = first - 1.5 * HOUR
    for minutes in (0, 30, 60):
        tick(db, start + DAY + 1.6 * HOUR + minutes * HOUR / 60)
    assert list(begun(db).values()) == [_show(row, db, first + DAY)]
    end_all(db)
    tick(db, start + HOUR)
    tick(db, first)
    assert sorted(begun(db).values()) == [_show(row, db, first), _show(row, db, first + DAY)]


def _show(row: SetRow, db: Database, at: datetime) -> str:
    return schedules._show(store.list_schedules(db, [row.id])[row.id].schedule, at)


def test_a_cancel_and_a_time_that_comes_do_not_wait_for_each_other(
    db: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are locked in one order. PostgreSQL ended one of the two before."""
    row, first = submit(db)
    taken, locked, ended = threading.Event(), threading.Event(), list[str]()
    take_time, may_cancel = store.take_time, store_sets.may_cancel

    def take(*of: Any, **options: Any) -> bool:
        done = take_time(*of, **options)
        taken.set()
        locked.wait(0.5)
        return done

    def may(*of: Any) -> bool:
        done = may_cancel(*of)
        locked.set()
        return done

    monkeypatch.setattr(store, "take_time", take)
    monkeypatch.setattr(store_sets, "may_cancel", may)
    other = open_database(database_url)

    def cancel() -> None:
        taken.wait(5)
        sets.cancel(other, row.id)
        ended.append("cancel")

    thread = threading.Thread(target=cancel)
    thread.start()
    schedules.begin_due(db, now=first)
    thread.join()
    other.close()
    found = store_sets.find_set(db, row.id)
    assert ended == ["cancel"] and found is not None and found.cancel_at is not None
    assert store.list_schedules(db, [row.id])[row.id].note == ""
