"""GPU hours by person, project and target, with and without prices; figures of one page are of one moment."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from pages import samples
from trainmaster.core.spec import Limits
from trainmaster.pages import budgets, cost, job_cost, job_goodput, project_costs, spending
from trainmaster.store import costs, tables
from trainmaster.store.database import Database
from trainmaster.store.page_rows.runs import find_jobs
from trainmaster.web.beside import Beside
from trainmaster.web.ledgers import Ledgers, Sums
from web.test_cost_page import HOUR, NOW, run


def hold(db: Database, job: str, *, nodes: int, each: int) -> None:
    """Let a job hold so many GPUs."""
    spec = {"resources": {"nodes": nodes, "processes_per_node": each}}
    with db.write() as conn:
        conn.execute(update(tables.jobs).where(tables.jobs.c.id == job).values(spec=spec, gpus=nodes * each))


@pytest.mark.both_databases
def test_gpu_hours_say_who_used_how_much_without_any_price(any_db: Database) -> None:
    db = any_db
    hold(db, run(db, cents=0, start=NOW - 5 * HOUR, hours=2, by="ann", target="local").id, nodes=2, each=4)
    hold(db, run(db, cents=None, start=NOW - 3 * HOUR, by="bob", project="lab", target="slurm").id, nodes=1, each=8)
    run(db, cents=0, start=NOW - HOUR, by="bob", project="lab", target="local", over=False)
    page = spending.read(db, month=NOW, now=NOW)
    used = {(line.name, round(line.gpu_hours, 6)) for line in page.people}
    assert used == {("ann", 16.0), ("bob", 9.0)} and round(page.gpu_hours, 6) == 25.0
    assert [(line.name, round(line.gpu_hours, 6)) for line in page.projects] == [("research", 16.0), ("lab", 9.0)]
    assert {line.name: round(line.gpu_hours, 6) for line in page.targets} == {"local": 17.0, "slurm": 8.0}
    (going,) = page.going
    assert (going.gpus, round(going.gpu_hours, 6)) == (1, 1.0)
    api = project_costs.read(db, now=NOW)
    assert [(line.project, round(line.month_gpu_hours, 6)) for line in api.projects] == [
        ("lab", 9.0),
        ("research", 16.0),
    ]
    assert {line.name for line in api.people} == {"ann", "bob"}
    assert all(line.total.cents is None and line.total.known_cents == 0 for line in api.projects)
    listed = cost.read(db, now=NOW)
    assert {line.project: round(line.gpu_hours, 6) for line in listed.projects} == {"lab": 9.0, "research": 16.0}
    assert {line.name for line in listed.people} == {"ann", "bob"}


def test_a_page_without_prices_has_no_column_of_money(db: Database, client: TestClient) -> None:
    now = datetime.now(UTC)
    for by in ("ann", "bob"):
        run(db, cents=0, start=now - 2 * HOUR, by=by, target="local")
    run(db, cents=0, start=now - HOUR, by="ann", target="local", over=False)
    with db.write() as conn:
        costs.set_budget(conn, "research", "month", 500_000, at=now)
    main = client.get("/cost?month=all").text.partition("<main")[2]
    card = main.partition('id="budgets"')[2].partition("</section>")[0]
    assert card.count("unknown") == 3 and "$5,000.00" in card and "$0.00" not in card
    main = main.replace(card, "")
    money = main.partition('id="goodput"')[0].replace("so what it cost is unknown", "")  # below, a bin is called so
    assert "unknown" not in money and "$0.00" not in main
    assert main.count("price_per_hour") == 1 and "GPU hours" in main
    person = main.partition('id="by-person"')[2].partition("</section>")[0]
    assert ">2.0<" in person and ">1.0<" in person
    client.app.state.ledgers.refresh()  # type: ignore[attr-defined]
    main = client.get("/cost?month=all").text.partition("<main")[2]
    assert "What the GPUs did" in main and "$0.00" not in main and "Lost, in all" not in main


def test_a_job_without_a_price_that_waits_costs_unknown_on_its_page(db: Database, client: TestClient) -> None:
    waits = samples.Story(db, samples.spec(target="local"), at=NOW)
    ledger = job_goodput.read(db, waits.id, now=NOW + HOUR)
    assert ledger is not None and ledger.goodput.cents is None
    text = client.get(f"/jobs/{waits.id}/cost").text.partition("<main")[2]
    assert "$0.00" not in text
    over = run(db, cents=0, start=NOW - HOUR, target="local")
    assert "$0.00" not in client.get(f"/jobs/{over.id}/cost").text.partition("<main")[2]


def test_a_budget_of_what_has_no_price_is_unknown_in_the_api(db: Database) -> None:
    run(db, cents=0, start=NOW - HOUR, target="local")
    with db.write() as conn:
        costs.set_budget(conn, "research", "total", 1000, at=NOW)
    (budget,) = budgets.read(db, now=NOW).budgets
    assert (budget.spent.cents, budget.spent.known_cents, budget.spent.unknown_parts) == (None, 0, 1)


def test_figures_of_one_page_are_of_one_moment(db: Database, client: TestClient) -> None:
    """What was added up minutes ago is not shown beside what is spent now, and all projects are no less than one."""
    now = datetime.now(UTC)
    run(db, cents=36_000, start=now - HOUR, over=False)
    ledgers: Ledgers = client.app.state.ledgers  # type: ignore[attr-defined]
    ledgers.refresh()
    old = ledgers.sums()
    assert old is not None
    ledgers._sums = type(old)(projects=old.projects, targets=old.targets, made_at=now - 5 * timedelta(minutes=1))
    assert ledgers.recent() is None or ledgers.recent().made_at > now  # type: ignore[union-attr]
    ledgers.refresh()
    moment = ledgers.recent()
    assert moment is not None
    text = client.get("/cost?month=all").text
    time.sleep(1.1)
    part = client.get("/cost?month=all&project=research").text
    for shown in (text, part):
        assert f"All figures are of {moment.made_at:%Y-%m-%d %H:%M:%S}" in shown

    def spent(page: str) -> str:
        return page.partition("<dt>Spent")[2].partition('"value">')[2].partition("<")[0]

    assert spent(text) == spent(part)


def test_what_ends_after_the_moment_of_a_page_is_counted_up_to_it(db: Database) -> None:
    run(db, cents=100, start=NOW - HOUR, hours=3)
    assert spending.read(db, now=NOW).known_cents == 100
    assert spending.read(db, month=NOW, now=NOW).known_cents == 100


def test_a_page_has_old_sums_made_anew(db: Database) -> None:
    ledgers = Ledgers(db, Beside())

    async def ask() -> Sums | None:
        stop = asyncio.Event()
        task = asyncio.create_task(ledgers.run(stop))
        try:
            await asyncio.sleep(0.05)
            return await asyncio.to_thread(ledgers.recent)
        finally:
            stop.set()
            await task

    made = asyncio.run(ask())
    assert made is not None and (datetime.now(UTC) - made.made_at).total_seconds() < 5


def test_a_forecast_of_a_limit_says_that_it_is_one(db: Database, client: TestClient) -> None:
    now = datetime.now(UTC)
    run(db, cents=100, start=now - HOUR, over=False)
    assert spending.read(db, month=now, now=now).bounded_jobs == 1
    assert "End of this month, at most" in client.get("/cost").text


def test_what_a_job_will_cost_at_its_time_limit_is_called_a_bound(db: Database, client: TestClient) -> None:
    now = datetime.now(UTC)
    story = run(db, cents=100, start=now - HOUR, over=False, limits=Limits(timeout_s=36_000))
    with db.read():
        shown = cost.figures(db, find_jobs(db, [story.id]), now=now)[story.id]
    assert shown.bound == "timeout_s" and shown.at_end is not None
    page = client.get(f"/jobs/{story.id}").text
    assert "(its time limit)" in page and "at the end" not in page.partition("<main")[2]
    tab = client.get(f"/jobs/{story.id}/cost").text
    assert "At its end, at most" in tab and "its time limit" in tab
    assert "of at most $" in client.get("/?status=running").text
    capped = run(db, cents=100, start=now - HOUR, over=False, limits=Limits(max_cost=3.0))
    answer = job_cost.read(db, capped.id, now=now)
    assert answer is not None and answer.forecast_bound == "max_cost"


def test_a_page_does_not_wait_for_sums_that_take_long(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass over a large database takes minutes, and each page would wait as long as it may, in vain."""
    ledgers, begun, go_on = Ledgers(db, Beside()), threading.Event(), threading.Event()

    def refresh(_stop: asyncio.Event) -> None:
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(ledgers, "refresh", refresh)
    monkeypatch.setattr("trainmaster.web.ledgers._PATIENCE_S", 0.2)

    async def ask() -> tuple[Sums | None, bool]:
        stop = asyncio.Event()
        task = asyncio.create_task(ledgers.run(stop))
        try:
            await asyncio.sleep(0.05)
            first = await asyncio.to_thread(ledgers.recent)
            await asyncio.to_thread(begun.wait, 60)
            await asyncio.sleep(0.3)
            monkeypatch.setattr(ledgers._made, "wait_for", lambda *_: pytest.fail("it waited"))
            return first, await asyncio.to_thread(ledgers.recent) is None
        finally:
            go_on.set()
            stop.set()
            await task

    assert asyncio.run(ask()) == (None, True)
