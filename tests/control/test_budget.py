"""Caps on money are held: a job is asked to save and stop, a spent project takes nothing in, people are told once."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from trainmaster.control import budget, reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.errors import OverBudget, SpecError
from trainmaster.core.money.cost import add_up, month_of
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.store import attempts, jobs, outbox, tables
from trainmaster.store import costs as money
from trainmaster.store.database import Database
from trainmaster.store.rows import AttemptRow, JobRow

pytestmark = pytest.mark.both_databases

SOURCE = str(Path(__file__).parents[2] / "src")
NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def spec(project: str = "default", *, price: float | None = None, **limits: Any) -> JobSpec:
    resources = {} if price is None else {"price_per_hour": price}
    return parse_spec(
        {"name": "paid", "project": project, "command": ["true"], "resources": resources, "limits": limits}
    )


def run_since(
    db: Database, job_spec: JobSpec, start: datetime, *, cents: float | None, released: datetime | None = None
) -> str:
    """A job that runs since then, as the reconciler would have written it; the id of the job."""
    job = submitting.submit(db, job_spec)
    with db.write() as conn:
        jobs.advance(conn, job.id, seen=Stage.QUEUED, to=Stage.RUNNING, at=start)
        attempt = attempts.insert_attempt(conn, job.id, 1, handle={}, at=start)
        money.set_price(conn, attempt, cents)
        if released is not None:
            attempts.end_attempt(conn, attempt, report=None, reason=None, message="", exit_record=None, at=released)
            attempts.mark_released(conn, attempt, at=released)
            jobs.advance(conn, job.id, seen=Stage.RUNNING, to=Stage.RELEASING, at=released)
            jobs.finish(conn, job.id, seen=Stage.RELEASING, status=Status.COMPLETED, at=released)
    return job.id


def cap(db: Database, project: str, period: str, cents: int) -> None:
    with db.write() as conn:
        money.set_budget(conn, project, period, cents, at=NOW)


def attempt_of(db: Database, job_id: str) -> AttemptRow:
    return attempts.list_attempts(db, job_id)[-1]


def told(db: Database) -> list[tuple[str, str]]:
    with db.write() as conn:  # the dispatcher's own view of what is new
        return [(row.topic, row.payload["message"]) for row in outbox.list_unspread(conn)]


def test_news_of_a_cap_under_a_cent_has_its_parts(db: Database) -> None:
    run_since(db, spec(price=0.004, max_cost=0.005), NOW, cents=0.4)
    budget.enforce(db, now=NOW + 1.05 * HOUR)
    with db.write() as conn:
        (news,) = outbox.list_unspread(conn)
    assert news.topic == "budget.warning"
    assert (news.payload["spent_cents"], news.payload["cap_cents"]) == (0.42, 0.5)


def test_a_job_is_warned_at_four_fifths_and_stopped_at_its_cap(db: Database) -> None:
    job_id = run_since(db, spec(price=6, max_cost=3), NOW, cents=600)
    assert budget.enforce(db, now=NOW) == NOW + 0.4 * HOUR, "it knows when to look again"
    assert told(db) == [] and attempt_of(db, job_id).stop_reason is None
    assert budget.enforce(db, now=NOW + 0.41 * HOUR) == NOW + 0.5 * HOUR
    assert told(db) == [("budget.warning", "limits.max_cost is nearly spent: $2.46 of $3.00")]
    for _ in range(2):
        budget.enforce(db, now=NOW + 0.5 * HOUR)
        assert attempt_of(db, job_id).stop_reason is Reason.OVER_BUDGET
    assert [topic for topic, _ in told(db)] == ["budget.warning", "budget.exceeded"], "each is told once"


def test_a_cap_counts_the_earlier_jobs_of_a_run(db: Database) -> None:
    first = run_since(db, spec(price=6, max_cost=3), NOW - HOUR, cents=600, released=NOW - 0.6 * HOUR)  # $2.40
    again = run_since(db, replace(spec(price=6, max_cost=3), resume_from=first), NOW, cents=600)
    budget.enforce(db, now=NOW + 0.05 * HOUR)
    assert attempt_of(db, again).stop_reason is None
    budget.enforce(db, now=NOW + 0.11 * HOUR)  # $0.66 more
    assert attempt_of(db, again).stop_reason is Reason.OVER_BUDGET
    job = jobs.find_job(db, again)
    assert job is not None
    why = budget.refuse_start(db, replace(job, attempts=0), now=NOW + 0.2 * HOUR)
    assert why is not None and "limits.max_cost is spent" in why


@pytest.mark.parametrize(
    ("stated", "charged", "cents"),
    [(1.0, 300.0, 300.0), (5.0, 300.0, 500.0), (None, 300.0, 300.0), (1.0, None, 100.0), (None, None, 0.0)],
)
def test_a_spec_cannot_undercut_the_price_of_its_target(
    stated: float | None, charged: float | None, cents: float
) -> None:
    handle = {} if charged is None else {"price_cents_per_hour": charged}
    assert budget.price_of(spec(price=stated), handle) == cents


@pytest.mark.parametrize("period", ["total", "month"])
def test_a_project_that_has_spent_its_budget_is_stopped_and_takes_nothing_in(db: Database, period: str) -> None:
    paid = run_since(db, spec("lab"), NOW - HOUR, cents=500)
    free = run_since(db, spec("lab"), NOW - HOUR, cents=0)
    other = run_since(db, spec("other"), NOW - HOUR, cents=500)
    last_month = run_since(db, spec("lab"), NOW - 40 * 24 * HOUR, cents=400, released=NOW - 40 * 24 * HOUR + HOUR)
    cap(db, "lab", period, 700)
    budget.enforce(db, now=NOW)
    stopped = attempt_of(db, paid).stop_reason is Reason.OVER_BUDGET
    assert stopped == (period == "total"), "what was spent in another month counts in the total alone"
    budget.enforce(db, now=NOW + HOUR)
    assert attempt_of(db, paid).stop_reason is Reason.OVER_BUDGET
    assert [attempt_of(db, job).stop_reason for job in (free, other, last_month)] == [None, None, None]
    assert [topic for topic, _ in told(db)].count("budget.exceeded") == 1
    with db.write() as conn, pytest.raises(OverBudget, match=r"lab .* is spent: \$\d+\.00 of \$7\.00"):
        budget.admit(conn, "lab", paid=True, now=NOW + HOUR)
    with db.write() as conn:
        budget.admit(conn, "lab", paid=False, now=NOW + HOUR)  # what costs nothing may come in
        budget.admit(conn, "other", paid=True, now=NOW + HOUR)
        money.set_budget(conn, "lab", period, 10_000, at=NOW)
        budget.admit(conn, "lab", paid=True, now=NOW + HOUR)


def test_a_submit_into_a_spent_project_leaves_no_row(db: Database) -> None:
    cap(db, "lab", "month", 0)
    with pytest.raises(OverBudget, match=r"\$0.00 of \$0.00"):
        submitting.submit(db, spec("lab", price=1))
    assert jobs.count_jobs(db) == 0
    assert submitting.submit(db, spec("lab")).status is Status.PENDING, "this machine costs nothing"


def test_a_price_that_nobody_knows_makes_a_cost_that_nobody_knows(db: Database) -> None:
    known = run_since(db, spec("lab"), NOW - HOUR, cents=500)
    unknown = run_since(db, spec("lab", max_cost=1000), NOW - HOUR, cents=None)
    costs = money.job_costs(db, [known, unknown], now=NOW)
    assert (costs[known].cents, costs[unknown].cents) == (500, None)
    with db.read() as conn:
        whole = money.spent(conn, "lab", now=NOW)
    assert (whole.cents, whole.known_cents, whole.unknown) == (None, 500, 1)
    budget.enforce(db, now=NOW)
    assert attempt_of(db, known).stop_reason is None
    row = attempt_of(db, unknown)
    assert row.stop_reason is Reason.OVER_BUDGET and "cannot be held" in row.message, "a cap that cannot be counted"


def test_a_cap_on_a_target_of_unknown_price_is_refused_before_there_is_a_row(db: Database) -> None:
    with pytest.raises(SpecError, match=r"limits.max_cost: the price of slurm is not known.*price_per_hour"):
        submitting.submit(db, replace(spec("lab", max_cost=5), target="slurm"))
    assert jobs.count_jobs(db) == 0
    assert submitting.submit(db, replace(spec("lab", max_cost=5, price=2), target="slurm")).status is Status.PENDING


def rent(db: Database, attempt: str, nonce: str, state: str, cents: float | None, **times: datetime) -> None:
    with db.write() as conn:
        conn.execute(
            tables.instances.insert().values(
                attempt=attempt,
                target="cloud",
                nonce=nonce,
                state=state,
                price_cents_per_hour=cents,
                created_at=NOW,
                **times,
            )
        )


def test_rented_machines_cost_until_the_cloud_says_that_they_are_gone(db: Database) -> None:
    job_id = run_since(db, spec("lab"), NOW, cents=None, released=NOW + HOUR)
    attempt = f"{job_id}.1"
    rent(db, attempt, "a", "gone", 600, launched_at=NOW, gone_at=NOW + 3 * HOUR)
    rent(db, attempt, "b", "intended", 600)
    now = NOW + 10 * HOUR
    assert money.job_costs(db, [job_id], now=now)[job_id].cents == 1800
    rent(db, attempt, "c", "launching", 100)  # nobody knows whether it exists: counted from the asking
    assert money.job_costs(db, [job_id], now=now)[job_id].cents == 1800 + 1000
    rent(db, attempt, "d", "active", None, launched_at=NOW)
    assert money.job_costs(db, [job_id], now=now)[job_id].cents is None
    with db.write() as conn:
        money.set_price(conn, attempt, 700)
    assert money.job_costs(db, [job_id], now=now)[job_id].cents == 7000, "the whole is known where a part is not"


def test_the_database_adds_up_what_we_would_have(db: Database) -> None:
    """What is over is summed by the database, each kind in its own words: the same as span by span."""
    chance = random.Random(7)
    for number in range(12):
        start = NOW - timedelta(days=chance.uniform(0, 60), seconds=chance.random())
        price = chance.choice([None, 0.0, 638.0, chance.uniform(0, 9999)])
        over = None if number % 4 == 0 else start + timedelta(hours=chance.uniform(0, 400))
        run_since(db, spec(chance.choice(["lab", "other"])), start, cents=price, released=over)
    with db.read() as conn:
        for window in (None, month_of(NOW), month_of(NOW - timedelta(days=31))):
            for project in ("lab", "other"):
                charges = money.list_charges(conn, project=project, window=window)
                plain = add_up((span for charge in charges for span in charge.spans), now=NOW, window=window)
                spent = money.spent(conn, project, now=NOW, window=window)
                assert spent.unknown == plain.unknown and spent.known_cents == pytest.approx(
                    plain.known_cents, abs=0.01
                )


def test_prices_come_from_the_spec_then_from_the_target() -> None:
    elsewhere = parse_spec({"name": "x", "target": "cloud:big", "command": ["true"]})
    assert budget.price_of(spec(price=2.5), {"price_cents_per_hour": 9}) == 250
    assert budget.price_of(elsewhere, {"price_cents_per_hour": 9}) == 9
    assert budget.price_of(spec(), {}) == 0
    for odd in (None, "9", -1, float("nan"), True):
        assert budget.price_of(elsewhere, {"price_cents_per_hour": odd}) is None


SAVES = """
import os, signal, sys, time
from pathlib import Path
saved = Path(os.environ["TRAINMASTER_CHECKPOINTS"]) / "step"
saved.parent.mkdir(parents=True, exist_ok=True)
step = int(saved.read_text()) if saved.exists() else 0
def save(*_):
    saved.write_text(str(step))
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    step += 1
    time.sleep(0.01)
"""


def drive(db: Database, home: Path, job: JobRow, act: Callable[[JobRow], None]) -> JobRow:
    async def main() -> JobRow:
        stop = asyncio.Event()
        tasks = [
            asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=0.1)),
            asyncio.create_task(budget.run(db, stop=stop, look_s=0.1)),
        ]
        while True:
            now = jobs.find_job(db, job.id)
            assert now is not None
            if now.status.final:
                break
            act(now)
            await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*tasks)
        return now

    return asyncio.run(main())


@pytest.mark.matrix(one_in=2)
def test_a_real_job_over_its_budget_saves_and_stops(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    mapping = {
        "name": "real", "project": "lab", "command": [sys.executable, "-c", SAVES], "preflight": {"level": 0},
        "resources": {"price_per_hour": 3600}, "limits": {"grace_s": 30, "attempts": 3},
    }  # fmt: skip
    job = submitting.submit(db, parse_spec(mapping))
    log = tmp_path / "jobs" / job.id / "attempts" / "1" / "rank-0.log"

    def act(now: JobRow) -> None:
        if now.stage is Stage.RUNNING and log.exists() and "ready" in log.read_text():
            cap(db, "lab", "total", 1)

    job = drive(db, tmp_path, job, act)
    assert (job.status, job.reason, job.attempts) == (Status.FAILED, Reason.OVER_BUDGET, 1), "and is not tried again"
    (attempt,) = attempts.list_attempts(db, job.id)
    assert attempt.exit is not None and attempt.exit.resumable and attempt.exit.exit_codes == {"0": 75}
    assert "the budget of project lab (total) is spent" in job.message
    assert int((tmp_path / "jobs" / job.id / "checkpoints" / "step").read_text()) > 0, "it had its grace to save"
    assert attempt.price_cents_per_hour == 360_000 and attempt.released_at is not None
    later = datetime.now(UTC) + HOUR
    amounts = [money.job_costs(db, [job.id], now=now)[job.id].cents for now in (datetime.now(UTC), later)]
    assert amounts[0] is not None and amounts[0] > 0 and amounts[0] == amounts[1], "what was given back costs no more"
