"""The page of costs: sums of the caller's rows alone, unknown is never nothing, and the forecast is what it states."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import insert, update
from starlette.testclient import TestClient

from pages import samples
from trainmaster.cli.jobs import cost as cli_cost
from trainmaster.core.money.cost import month_of
from trainmaster.core.roles import Role
from trainmaster.core.schema import to_plain
from trainmaster.core.spec import Limits
from trainmaster.core.states import Stage, Status
from trainmaster.pages import cost, job_cost, spending
from trainmaster.store import attempts, costs, tables
from trainmaster.store.database import Database
from trainmaster.store.page_rows.runs import find_jobs
from trainmaster.web.app import create_app
from trainmaster.web.kept import Kept
from web.conftest import BASE, LOCAL
from web.furnished import issue

NOW = datetime(2026, 11, 11, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
_NO_LIMITS = Limits()


def run(
    db: Database, *, cents: float | None, start: datetime, hours: float = 1.0, over: bool = True, by: str | None = None,
    project: str = "research", target: str = "lambda", limits: Limits = _NO_LIMITS, resume_from: str | None = None,
    status: Status = Status.COMPLETED,
) -> samples.Story:  # fmt: skip
    """A job whose attempt is placed at a time and costs so much an hour."""
    spec = replace(samples.spec(project=project, target=target), limits=limits, resume_from=resume_from)
    story = samples.Story(db, spec, at=start).start()
    with db.write() as conn:
        costs.set_price(conn, story.attempt, cents)
        conn.execute(update(tables.attempts).where(tables.attempts.c.id == story.attempt).values(created_at=start))
        conn.execute(update(tables.jobs).where(tables.jobs.c.id == story.id).values(submitted_by=by))
        if over:
            attempts.mark_released(conn, story.attempt, at=start + hours * HOUR)
    return story.end_attempt().finish(status) if over else story.move(Stage.RUNNING)


def test_sums_by_project_person_target_and_month(db: Database) -> None:
    run(db, cents=100, start=NOW - 2 * HOUR, by="ann")
    run(db, cents=300, start=NOW - 5 * HOUR, hours=2, by="bob", project="lab", target="slurm")
    run(db, cents=500, start=NOW - timedelta(days=40), by="ann")  # in October
    run(db, cents=None, start=NOW - 3 * HOUR, by="ann")
    run(db, cents=0, start=NOW - 3 * HOUR, target="local")
    page = spending.read(db, month=NOW, now=NOW)
    assert [(line.name, line.known_cents, line.unknown_parts) for line in page.projects] == [
        ("lab", 600, 0), ("research", 100, 2),
    ]  # fmt: skip
    assert [(line.name, line.known_cents) for line in page.people] == [("bob", 600), ("ann", 100), (None, 0)]
    assert [(line.name, line.known_cents) for line in page.targets] == [("slurm", 600), ("lambda", 100), ("local", 0)]
    assert [(line.name, line.known_cents) for line in page.months][:3] == [
        ("2026-11", 700), ("2026-10", 500), ("2026-09", 0),
    ]  # fmt: skip
    assert spending.read(db, now=NOW).known_cents == 1200
    assert (page.known_cents, page.unknown_parts) == (700, 2)
    assert sum(line.known_cents for line in spending.read(db, project="lab", now=NOW).projects) == 600


def test_what_has_no_price_stays_unknown_beside_what_has_one(any_db: Database) -> None:
    """Two runs of one person on a machine whose price is 0 by default: one states a price, the other none."""
    for _ in range(2):
        run(any_db, cents=0, start=NOW - 3 * HOUR, target="local")
    run(any_db, cents=200, start=NOW - 3 * HOUR, target="local")
    run(any_db, cents=0, start=NOW - HOUR, target="local", over=False)
    free = run(any_db, cents=0, start=NOW - 2 * HOUR, target="local")
    with any_db.write() as conn:
        stated = {**to_plain(free.spec), "resources": {"price_per_hour": 0.0}}
        conn.execute(update(tables.jobs).where(tables.jobs.c.id == free.id).values(spec=stated))
    page = spending.read(any_db, month=NOW, now=NOW)
    (line,) = page.targets
    assert (line.known_cents, line.unknown_parts, line.attempts) == (200, 3, 5)
    assert page.months[0].unknown_parts == 3 and spending.read(any_db, now=NOW).unknown_parts == 3


def test_what_runs_now_without_a_price_is_unknown_and_not_nothing(db: Database, client: TestClient) -> None:
    now = datetime.now(UTC)
    story = run(db, cents=0, start=now - HOUR, target="local", over=False)
    run(db, cents=None, start=now - HOUR, target="slurm", over=False)
    page = spending.read(db, month=now, now=now)
    assert (page.cents_per_hour, page.unknown_going, page.forecast_cents) == (0, 2, None)
    assert "$0.00" not in client.get("/cost").text.partition('id="by-')[0]
    assert "$0.00" not in client.get(f"/jobs/{story.id}/cost").text
    run(db, cents=100, start=now - HOUR, over=False, limits=Limits(max_cost=2.0))
    page = spending.read(db, month=now, now=now)
    assert (page.cents_per_hour, page.unknown_going, page.forecast_cents) == (100, 2, 200)
    client.app.state.kept = Kept()  # type: ignore[attr-defined]
    text = client.get("/cost").text
    assert (
        "and 2 attempts without a price" in text
        and "its limits or the end of the month, and 2 attempts without a price" in text
    )


def test_a_person_links_to_their_runs(db: Database, client: TestClient) -> None:
    now = datetime.now(UTC)
    own = run(db, cents=500, start=now - HOUR, hours=0.5, by="ann & co")
    others = [run(db, cents=500, start=now - HOUR, hours=0.5, by=by) for by in (None, "joann & co")]
    card = client.get("/cost?month=all").text.partition('id="by-person"')[2].partition("</section>")[0]
    first, other = map(html.unescape, re.findall(r'href="([^"]+)"', card))  # none for the command line
    runs = client.get(min(first, other)).text  # joann's holds ann's name
    assert f"/jobs/{own.id}" in runs and not any(f"/jobs/{each.id}" in runs for each in others)
    assert "submitted by <b>ann &amp; co</b>, in all months" in runs and 'name="by" value="ann &amp; co"' in runs


def test_a_budget_says_how_much_has_no_price(db: Database, client: TestClient) -> None:
    now = datetime.now(UTC)
    with db.write() as conn:
        costs.set_budget(conn, "research", "total", 10_000, at=now)
    run(db, cents=500, start=now - 2 * HOUR)
    assert "attempts without a price" not in client.get("/cost").text
    run(db, cents=0, start=now - HOUR, target="local", over=False)
    run(db, cents=None, start=now - 2 * HOUR)
    run(db, cents=None, start=now - 2 * HOUR, project="other")
    (line,) = spending.read(db, now=now).budgets
    assert (line.spent_cents, line.unknown_parts) == (500, 2)
    client.app.state.kept = Kept()  # type: ignore[attr-defined]
    card = client.get("/cost").text.partition('id="budgets"')[2].partition("</section>")[0]
    assert '$5.00<span class="under">and 2 attempts without a price</span>' in card


def test_a_job_without_a_price_that_never_ran_costs_unknown_as_one_that_ran_does(db: Database) -> None:
    ran = run(db, cents=0, start=NOW - HOUR, target="local")
    never = samples.Story(db, samples.spec(target="local"), at=NOW)
    stated = samples.Story(db, samples.spec(target="local", resources={"price_per_hour": 0.0}), at=NOW)
    ids = [ran.id, never.id, stated.id]
    shown = cost.figures(db, find_jobs(db, ids), now=NOW)
    assert [shown[job][:2] for job in ids] == [(None, None), (None, None), (0, 0)]
    assert cost.list_spent(db, ids, now=NOW) == {ran.id: None, never.id: None, stated.id: 0}


def test_a_span_over_the_end_of_a_month_is_split(db: Database) -> None:
    run(db, cents=100, start=datetime(2026, 10, 31, 23, tzinfo=UTC), hours=3)
    page = spending.read(db, month=NOW, now=NOW)
    assert [line.known_cents for line in page.months][:2] == [200, 100] and page.known_cents == 200


def test_the_forecast_is_what_runs_now_until_the_month_ends(db: Database) -> None:
    run(db, cents=1000, start=NOW - 3 * HOUR, hours=2)
    run(db, cents=50, start=NOW - 2 * HOUR, over=False)  # its remaining time is unknown
    with db.write() as conn:
        costs.set_budget(conn, "research", "month", 10_000, at=NOW)
        costs.set_budget(conn, "research", "total", 2_200, at=NOW)
    page = spending.read(db, month=NOW, now=NOW)
    rest_h = (month_of(NOW).end - NOW) / HOUR
    assert page.cents_per_hour == 50
    assert page.forecast_cents == round(2100 + 50 * rest_h)
    month, total = page.budgets
    assert (month.spent_cents, month.left_cents, month.forecast_cents) == (2100, 7900, page.forecast_cents)
    assert month.reached_at is not None and total.reached_at is not None
    assert round((month.reached_at - NOW) / HOUR, 3) == 158, "7,900 cents at 50 an hour"
    assert (total.left_cents, total.forecast_cents, round((total.reached_at - NOW) / HOUR, 3)) == (100, None, 2)


def fill_with_ends(into: Database, at: datetime) -> None:
    for status, prices in (
        (Status.FAILED, (300, 400)), (Status.CANCELLED, (200, None)), (Status.COMPLETED, (1000,)),
    ):  # fmt: skip
        for cents in prices:
            run(into, cents=cents, start=at - HOUR, status=status)
    run(into, cents=5000, start=at - timedelta(days=100), status=Status.FAILED)
    run(into, cents=77, start=at - HOUR, status=Status.FAILED, project="other")


def test_what_failed_and_what_was_cancelled_is_told_apart(any_db: Database, capsys: pytest.CaptureFixture[str]) -> None:
    """All that such jobs cost in the month, with attempts without a price."""
    fill_with_ends(any_db, NOW)
    for page in (
        spending.read(any_db, project="research", month=NOW, now=NOW),
        cost.read(any_db, project="research", month=NOW, now=NOW),
    ):
        assert page.failed is not None and page.cancelled is not None
        assert (page.failed.cents, page.failed.unknown_parts) == (700, 0)
        assert (page.cancelled.cents, page.cancelled.known_cents, page.cancelled.unknown_parts) == (None, 200, 1)
    for read in (spending.read, cost.read):
        whole = read(any_db, now=NOW).failed
        assert whole is not None and whole.cents == 5777
    only = cost.read(any_db, job=cost.read(any_db, now=NOW).jobs[0].id, now=NOW)
    assert (only.failed, only.cancelled) == (None, None)
    cli_cost._print(cost.read(any_db, month=NOW, now=NOW), single=False)
    said = capsys.readouterr().err
    assert "of it jobs that failed: $7.77\n" in said
    assert "of it jobs that were cancelled: $2.00 and 1 attempt without a price" in said


@pytest.mark.parametrize("reason", ["over_budget", "timed_out", "crashed"])
def test_what_a_limit_ended_did_not_fail(db: Database, capsys: pytest.CaptureFixture[str], reason: str) -> None:
    run(db, cents=300, start=NOW - HOUR, status=Status.FAILED)
    stopped = run(db, cents=500, start=NOW - HOUR, status=Status.FAILED)
    with db.write() as conn:
        conn.execute(tables.jobs.update().where(tables.jobs.c.id == stopped.id).values(reason=reason))
    for page in (spending.read(db, month=NOW, now=NOW), cost.read(db, month=NOW, now=NOW)):
        assert page.failed is not None and page.limited is not None
        found = (page.failed.cents, page.limited.cents)
        assert found == ((800, 0) if reason == "crashed" else (300, 500))
    cli_cost._print(cost.read(db, month=NOW, now=NOW), single=False)
    said = capsys.readouterr().err
    assert ("jobs that a budget or a time limit ended: $5.00" in said) == (reason != "crashed")


def test_what_failed_and_what_was_cancelled_has_figures_of_its_own(client: TestClient, db: Database) -> None:
    fill_with_ends(db, datetime.now(UTC))
    client.app.state.ledgers.refresh()  # type: ignore[attr-defined]
    text = client.get("/cost?month=all&project=research").text

    def figure(key: str) -> str:
        found = text.partition(f'id="{key}">')[2].partition("</div>" if key == "lost" else "</dd>")[0]
        return " ".join(re.sub("<[^>]+>", " ", found).split())

    assert figure("failed") == "jobs that failed: $57.00"
    assert figure("cancelled") == "jobs that were cancelled: $2.00 and 1 attempt without a price"
    assert figure("lost").startswith("Lost, in all months $")
    assert "repeated work, stalled, save stall, idle after the end, data wait and straggler wait in" in text


def test_a_budget_has_a_date_only_where_the_forecast_comes_to_it(db: Database) -> None:
    """$1 an hour for two hours more, and $10 an hour for one: $12 ahead."""
    for cents, left_h in ((100, 2), (1000, 1)):
        limits = Limits(timeout_s=left_h * 3600 + 3598, grace_s=0)  # it starts 2 s after it is placed
        run(db, cents=cents, start=NOW - HOUR, over=False, limits=limits)
    with db.write() as conn:
        for project in ("research", "lab"):
            costs.set_budget(conn, project, "month", 2_400, at=NOW)
            costs.set_budget(conn, project, "total", 2_400, at=NOW)

    def read() -> list[tuple[int | float, object, object]]:
        lines = spending.read(db, month=NOW, now=NOW).budgets
        return [
            (line.spent_cents, line.forecast_cents, line.reached_at and round((line.reached_at - NOW) / HOUR, 2))
            for line in lines
        ]

    assert read() == [(0, 0, None), (0, None, None), (1100, 2300, None), (1100, None, None)]
    for cap, hours in ((2_300, 2.0), (2_250, 1.5), (2_200, 1.0), (1_650, 0.5), (1_000, 0.0)):
        with db.write() as conn:
            for period in ("month", "total"):
                costs.set_budget(conn, "research", period, cap, at=NOW)
        assert [line[2] for line in read()[2:]] == [hours, hours], cap
    run(db, cents=1, start=NOW, over=False)  # nothing says when it ends
    with db.write() as conn:
        costs.set_budget(conn, "research", "total", 2_400, at=NOW)
    assert read()[3][2] == 100.0


def test_a_budget_without_a_date_says_for_which_time(db: Database, client: TestClient) -> None:
    with db.write() as conn:
        for period in ("month", "total"):
            costs.set_budget(conn, "research", period, 2_400, at=NOW)
    card = client.get("/cost").text.partition('id="budgets"')[2].partition("</section>")[0]
    assert card.count("not this month") == card.count("not at this rate") == 1


def test_the_limits_of_a_job_bound_its_forecast(db: Database) -> None:
    """$36 an hour for ten minutes and the grace, not until the month ends. It starts 2 s after it is placed."""
    run(db, cents=3600, start=NOW - HOUR / 12, over=False, limits=Limits(timeout_s=600, grace_s=60))
    assert spending.read(db, month=NOW, now=NOW).forecast_cents == 662
    run(db, cents=3600, start=NOW - HOUR / 12, over=False, limits=Limits(max_cost=5.0))
    assert spending.read(db, month=NOW, now=NOW).forecast_cents == 662 + 500
    lines = cost.read(db, now=NOW).jobs
    assert sorted(line.forecast_cents or 0 for line in lines) == [500, 662], "the command line says the same"
    assert sorted(found.forecast_cents or 0 for line in lines if (found := job_cost.read(db, line.id, now=NOW))) == [
        500,
        662,
    ]


def test_a_cap_bounds_the_forecast_of_the_whole_run(any_db: Database) -> None:
    """$8 of $10 are spent by the job that this one resumes: budget.enforce stops it at $2 of its own."""
    capped = Limits(max_cost=10.0)
    first = run(any_db, cents=800, start=NOW - 10 * HOUR, limits=capped)
    again = run(any_db, cents=100, start=NOW - HOUR / 2, over=False, limits=capped, resume_from=first.id)
    (found,) = find_jobs(any_db, [again.id])
    assert cost.figures(any_db, [found], now=NOW)[again.id] == (50, 200, "max_cost")
    assert {line.id: line.forecast_cents for line in cost.read(any_db, now=NOW).jobs} == {first.id: 800, again.id: 200}
    line = job_cost.read(any_db, again.id, now=NOW)
    assert line is not None and (line.forecast_cents, line.max_cost_cents) == (200, 1000)
    assert spending.read(any_db, month=NOW, now=NOW).forecast_cents == 800 + 200


def test_a_cap_under_a_cent_is_not_nothing(db: Database, client: TestClient) -> None:
    story = run(db, cents=0.2, start=NOW - HOUR, over=False, limits=Limits(max_cost=0.005))
    line = job_cost.read(db, story.id, now=NOW)
    assert line is not None and (line.forecast_cents, line.max_cost_cents) == (0.5, 0.5)
    assert "<dt>Limit</dt><dd>under $0.01</dd>" in client.get(f"/jobs/{story.id}/cost").text


def test_nobody_knows_what_a_queued_job_will_have_cost(db: Database) -> None:
    story = samples.Story(db, samples.spec(target="lambda", resources={"price_per_hour": 12.5}), at=NOW)
    line = job_cost.read(db, story.id, now=NOW)
    assert line is not None and line.forecast_cents is None
    assert cost.figures(db, find_jobs(db, [story.id]), now=NOW)[story.id] == (0, None, None)


def test_idle_machines_are_named_and_working_ones_are_not(db: Database) -> None:
    ended, works = run(db, cents=10, start=NOW - 9 * HOUR, hours=8), run(db, cents=10, start=NOW - HOUR, over=False)
    rows = [
        {"attempt": ended.attempt, "nonce": "left-behind", "state": "active", "price_cents_per_hour": 250.0},
        {"attempt": ended.attempt, "nonce": "returned", "state": "gone", "price_cents_per_hour": 250.0},
        {"attempt": works.attempt, "nonce": "busy", "state": "active", "price_cents_per_hour": 250.0},
    ]
    with db.write() as conn:
        for row in rows:
            conn.execute(insert(tables.instances).values(target="lambda", created_at=NOW - 9 * HOUR, **row))
        mine = update(tables.attempts).where(tables.attempts.c.id == ended.attempt)
        conn.execute(mine.values(ended_at=NOW - 2 * HOUR))
    (machine,) = spending.read(db, now=NOW).idle
    assert (machine.name, machine.job_id, machine.cents) == ("left-behind", ended.id, 500)
    assert "not given back" in machine.why


def test_the_page(client: TestClient, db: Database) -> None:
    assert "No costs yet" in client.get("/cost").text
    client.app.state.kept = Kept()  # type: ignore[attr-defined]  # what it keeps for some seconds
    run(db, cents=100, start=datetime.now(UTC) - 2 * HOUR, by="<b>ann</b>")
    with db.write() as conn:
        costs.set_budget(conn, "research", "month", 50, at=NOW)
    text = client.get("/cost").text
    assert "$1.00" in text and "&lt;b&gt;ann&lt;/b&gt;" in text and "−$0.50" in text
    assert 'href="/cost?project=research"' in text
    client.app.state.ledgers.refresh()  # type: ignore[attr-defined]
    assert "What the GPUs did for it" in client.get("/cost?month=all").text
    assert client.get("/cost?month=2026-13").status_code == 422


def test_a_caller_sees_the_costs_of_its_own_project(db: Database, tmp_path: Path) -> None:
    run(db, cents=100, start=datetime.now(UTC) - 2 * HOUR, by="ann", project="lab")
    run(db, cents=777, start=datetime.now(UTC) - 2 * HOUR, by="spy", project="victim")
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        client.app.state.ledgers.refresh()  # type: ignore[attr-defined]
        token = issue(db, "lab-viewer", Role.VIEWER, "lab")
        text = client.get("/cost?month=all", headers=token).text
        assert "ann" in text and "spy" not in text and "victim" not in text and "$7.77" not in text
        assert client.get("/cost?project=victim", headers=token).status_code == 403
        assert client.get("/cost").status_code == 303, "nobody is asked to sign in"
