"""Sums that are kept for a state of the database are those that are made anew, after each change."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Hashable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pages import samples
from trainmaster.control import maintain
from trainmaster.core.states import Reason, Status
from trainmaster.pages import budgets, cost, project_costs, spending
from trainmaster.storage import open_store
from trainmaster.store import attempts, costs
from trainmaster.store.database import Database
from trainmaster.store.page_rows.kept_sums import Recall

NOW = datetime(2026, 11, 19, 12, tzinfo=UTC)


def read_all(db: Database, now: datetime) -> list[Any]:
    return [
        page(db, project=project, now=now)
        for project in (None, "research", "other")
        for page in (project_costs.read, budgets.read, cost.read, spending.read)
    ]


def test_each_change_shows_at_once_and_no_sum_is_made_twice(db: Database) -> None:
    dice, stories, ended = random.Random(5), list[samples.Story](), set[str]()
    with db.write() as conn:
        for project in ("research", "other"):
            costs.set_budget(conn, project, "month", 10_000, at=NOW)

    def begin() -> None:
        spec = samples.spec(name=f"run-{len(stories)}", project=dice.choice(["research", "other"]))
        story = samples.Story(db, spec, at=NOW - timedelta(days=dice.randrange(60))).start()
        stories.append(story)

    def end(story: samples.Story) -> None:
        ended.add(story.id)
        story.at += timedelta(hours=dice.randrange(1, 9))
        if dice.random() < 0.5:
            story.end_attempt(Reason.CHECK_FAILED, "x").finish(Status.FAILED, Reason.CHECK_FAILED, "x")
        else:
            story.end_attempt().finish(Status.COMPLETED)

    def price(story: samples.Story) -> None:
        with db.write() as conn:
            costs.set_price(conn, story.attempt, float(dice.randrange(1, 500)))

    def release(story: samples.Story) -> None:
        with db.write() as conn:
            attempts.mark_released(conn, story.attempt, at=story.at + timedelta(hours=1))

    for _ in range(40):
        change = dice.choice(["begin", "end", "price", "release"])
        if change == "begin" or not stories:
            begin()
        story = dice.choice(stories)
        if change == "price":
            price(story)
        elif change == "release":
            release(story)
        elif story.id not in ended:
            end(story)
        kept = read_all(db, NOW)
        assert read_all(db, NOW) == kept
        db.kept.clear()
        assert read_all(db, NOW) == kept
        # A page of an earlier moment has nothing that was given back after it.
        earlier = read_all(db, NOW - timedelta(days=30))
        db.kept.clear()
        assert read_all(db, NOW - timedelta(days=30)) == earlier
    assert ended and len(ended) < len(stories)


def test_a_job_that_replaces_a_deleted_one_counts_by_itself(db: Database, tmp_path: Path) -> None:
    """Every count is as before: attempts, prices, jobs by status."""

    def complete(name: str, hours: int) -> str:
        story = samples.Story(db, samples.spec(name=name, project="research"), at=NOW - timedelta(days=1)).start()
        with db.write() as conn:
            costs.set_price(conn, story.attempt, 100.0)
        story.at += timedelta(hours=hours)
        story.end_attempt().finish(Status.COMPLETED)
        with db.write() as conn:
            attempts.mark_released(conn, story.attempt, at=story.at)
        return story.id

    first = complete("first", 1)
    before = read_all(db, NOW)
    maintain.delete_job(db, open_store(tmp_path / "storage"), tmp_path, first, by="somebody")
    complete("second", 10)
    after = read_all(db, NOW)
    db.kept.clear()
    assert before != after == read_all(db, NOW)


def test_threads_that_add_sums_do_not_disturb_each_other(db: Database) -> None:
    with db.read() as conn:
        recall = Recall(db, conn)
    ended: list[int] = []

    def add(first: int) -> None:
        for number in range(first, first + 20_000):
            recall(number, lambda: 0)
        ended.append(first)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=add, args=(at * 100_000,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(ended) == 4 and len(db.kept) <= 64


def test_what_did_not_change_is_not_summed_again(db: Database) -> None:
    story = samples.Story(db, samples.spec(name="one")).start()
    made: list[Hashable] = []

    def make(key: Hashable) -> int:
        made.append(key)
        return len(made)

    def sums(key: Hashable) -> int:
        with db.read() as conn:
            return Recall(db, conn)(key, functools.partial(make, key))

    assert [sums("a"), sums("a"), sums("b"), sums("a")] == [1, 1, 2, 1]
    with db.write() as conn:
        costs.set_price(conn, story.attempt, 7.0)
    assert [sums("a"), sums("a")] == [3, 3]
    for number in range(100):
        sums(number)
    assert len(db.kept) <= 64
