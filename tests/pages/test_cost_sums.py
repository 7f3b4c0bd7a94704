"""Costs of many jobs are summed by the database: the same as charge by charge, and few rows are fetched."""

from __future__ import annotations

import random
import uuid
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from pages import samples
from trainmaster.core.money.cost import Amount, Window, add_up, month_of, round_cents
from trainmaster.core.schema import to_plain
from trainmaster.pages import cost
from trainmaster.store import costs, tables
from trainmaster.store.database import Database
from trainmaster.store.page_rows import cost_sums

NOW = datetime(2026, 11, 11, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
LAST_MONTH = NOW - timedelta(days=30)


def fill(db: Database, dice: random.Random, jobs: int) -> None:
    """Jobs with attempts that go on, were given back, or are over with their job; prices of all kinds."""
    spec = to_plain(samples.spec())
    rows: dict[str, list[dict[str, Any]]] = {"jobs": [], "attempts": [], "instances": []}
    for number in range(jobs):
        own, over, start = str(uuid.UUID(int=dice.getrandbits(128), version=4)), dice.random() < 0.6, _ago(dice)
        target, project = dice.choice(["slurm", "local"]), f"p{number % 4}"
        stated = {**spec["resources"], "price_per_hour": dice.choice([None, 0, 3.5])}
        rows["jobs"].append({
            "id": own, "name": f"run-{number}", "project": project, "target": target, "message": "", "tries": 0,
            "status": "completed" if over else "running", "stage": None if over else "running", "attempts": 1,
            "spec": {**spec, "name": f"run-{number}", "project": project, "target": target, "resources": stated},
            "cancel_requested": False, "created_at": start, "ended_at": start + 5 * HOUR if over else None,
        })  # fmt: skip
        for place in range(1, dice.randint(1, 4)):
            placed, attempt = start + 2 * place * HOUR, f"{own}.{place}"
            released = placed + dice.uniform(0, 700) * HOUR if dice.random() < 0.7 else None
            rows["attempts"].append({
                "id": attempt, "job_id": own, "number": place, "message": "", "created_at": placed,
                "price_cents_per_hour": dice.choice([None, 0.0, 0.01, 100.0, 333.3]), "released_at": released,
                "ended_at": dice.choice([None, placed + HOUR]),
            })  # fmt: skip
            for _ in range(dice.choice([0, 0, 0, 1, 2])):
                rows["instances"].append({
                    "attempt": attempt, "target": target, "nonce": uuid.UUID(int=dice.getrandbits(128)).hex[:12],
                    "state": "running", "price_cents_per_hour": dice.choice([None, 50.0]), "created_at": placed,
                    "launched_at": placed, "gone_at": dice.choice([None, placed + 9 * HOUR]),
                })  # fmt: skip
    with db.write() as conn:
        for name, own_rows in rows.items():
            if own_rows:
                conn.execute(insert(tables.metadata.tables[name]), own_rows)
        for number in range(4):
            costs.set_budget(conn, f"p{number}", "month", 100_000, at=NOW)


def _ago(dice: random.Random) -> datetime:
    return NOW - dice.uniform(0, 1500) * HOUR


@pytest.mark.parametrize("month", [None, NOW, LAST_MONTH])
def test_the_sums_are_those_of_each_charge(any_db: Database, month: datetime | None) -> None:
    fill(any_db, random.Random(7), 60)
    window, everything = month_of(month) if month is not None else None, {}
    for when in (window, month_of(NOW)):
        everything[when] = sum_up(any_db, when)
    sums, of = everything[window]
    page = cost.read(any_db, month=month, limit=7, now=NOW)
    dearest = sorted(sums, key=lambda job: (-sums[job].known_cents, job))[:7]
    assert [line.id for line in page.jobs] == dearest
    assert [line.known_cents for line in page.jobs] == [round_cents(sums[job].known_cents) for job in dearest]
    assert page.more == len(sums) - 7
    for line in page.projects:
        own = [sums[job] for job in sums if of[job] == line.project]
        assert line.jobs == len(own)
        assert line.known_cents == pytest.approx(sum(each.known_cents for each in own), abs=1)
    for budget in page.budgets:
        this_month, of_month = everything[month_of(NOW)]
        own = [this_month[job] for job in this_month if of_month[job] == budget.project]
        assert budget.spent_cents == pytest.approx(sum(each.known_cents for each in own), abs=1)
        assert budget.unknown_jobs == sum(is_unknown(any_db, job, this_month[job]) for job in this_month
                                          if of_month[job] == budget.project)  # fmt: skip


def sum_up(db: Database, window: Window | None) -> tuple[dict[str, Amount], dict[str, str]]:
    """By job, what each of its charges comes to, and its project."""
    sums: dict[str, Amount] = defaultdict(Amount)
    of: dict[str, str] = {}
    with db.read() as conn:
        for charge in costs.list_charges(conn):
            if window is None or charge.touches(window, now=NOW):
                sums[charge.job_id] += add_up(charge.spans, now=NOW, window=window)
                of[charge.job_id] = charge.project
    return dict(sums), of


def is_unknown(db: Database, job: str, amount: Amount) -> bool:
    with db.read() as conn:
        return amount.unknown > 0 or (
            amount.known_cents == 0 and bool(costs.list_unpriced(conn, free=["local"], jobs=[job]))
        )


def test_jobs_that_are_over_come_as_sums(db: Database) -> None:
    """A row for each of ten thousand jobs was half of the time of the answer."""
    fill(db, random.Random(3), 80)
    with db.read() as conn:
        (sums,), going = cost_sums.sum_jobs(conn, free=["local"], windows=[None], most=5)
    assert len(sums.dearest) == 5 and set(sums.others) <= going
    assert not going & set(sums.dearest) and sum(each.jobs for each in sums.projects.values()) > 5
