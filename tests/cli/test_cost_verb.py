"""`trainmaster cost`: months, sums, forecasts and caps as a person and a program read them."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from client.served import serve
from trainmaster.cli.main import build
from trainmaster.control import submit as submitting
from trainmaster.core.errors import UsageError
from trainmaster.core.events import split
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage, Status
from trainmaster.pages import cost as page
from trainmaster.pages import job as job_page
from trainmaster.pages import jobs as jobs_page
from trainmaster.report import phrases
from trainmaster.store import attempts, audit, costs, jobs, tables
from trainmaster.store.database import Database
from trainmaster.store.events import append_events

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def a_job(
    db: Database, name: str, start: datetime, *, cents: float | None, hours: float | None = None, lines: bytes = b"",
    **more: Any,
) -> str:  # fmt: skip
    """A job that ran for so many hours, or still does; with these event lines."""
    job = submitting.submit(db, parse_spec({"name": name, "command": ["true"], "project": "lab", **more}))
    with db.write() as conn:
        jobs.advance(conn, job.id, seen=Stage.QUEUED, to=Stage.RUNNING, at=start)
        attempt = attempts.insert_attempt(conn, job.id, 1, handle={}, at=start)
        costs.set_price(conn, attempt, cents)
        if lines:
            append_events(conn, attempt, "events.jsonl", seen_offset=0, lines=split(lines, offset=0, zone=UTC))
        if hours is not None:
            end = start + hours * HOUR
            attempts.mark_released(conn, attempt, at=end)
            jobs.advance(conn, job.id, seen=Stage.RUNNING, to=Stage.RELEASING, at=end)
            jobs.finish(conn, job.id, seen=Stage.RELEASING, status=Status.COMPLETED, at=end)
    return job.id


def steps(*told: tuple[datetime, int], total: int) -> bytes:
    lines = [
        {"ts": at.isoformat(), "phase": "STEP", "event": "metrics", "data": {"step": step, "steps": total}}
        for at, step in told
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def ask(home: Path, *words: str) -> Result:
    env = {"TRAINMASTER_HOME": str(home), "COLUMNS": "200", "TERM": "dumb"}
    return CliRunner(env=env).invoke(build(), ["cost", *words])


def test_a_month_has_its_part_of_a_job_and_the_sums_are_whole(db: Database, tmp_path: Path) -> None:
    start = datetime(2026, 10, 31, 22, tzinfo=UTC)
    a_job(db, "over-the-turn", start, cents=1000, hours=6)
    a_job(db, "small", NOW, cents=100, hours=1)
    october, november, whole = (
        page.read(db, month=month, now=NOW + HOUR) for month in (start, NOW, None)
    )  # fmt: skip
    assert [line.cents for line in october.jobs] == [2000]
    assert [line.cents for line in november.jobs] == [4000, 100] and november.projects[0].cents == 4100
    assert whole.projects[0].cents == 6100 and [line.forecast_cents for line in whole.jobs] == [6000, 100]
    printed = ask(tmp_path, "--month", "2026-11")
    assert printed.exit_code == 0 and "$40.00" in printed.output and "$41.00" in printed.output
    answer = json.loads(ask(tmp_path, "--month", "2026-10", "--json").output)
    assert answer["month"] == "2026-10" and answer["jobs"][0]["cents"] == 2000


def test_a_running_job_has_a_forecast_from_its_steps(db: Database) -> None:
    told = steps((NOW, 1), (NOW + 2 * HOUR, 21), total=51)
    job_id = a_job(db, "going", NOW, cents=500, lines=told, limits={"max_cost": 30})
    (line,) = page.read(db, now=NOW + 2 * HOUR).jobs
    assert (line.cents, line.cents_per_hour, line.max_cost_cents) == (1000, 500, 3000)
    assert line.left_s == pytest.approx(3 * 3600) and line.forecast_cents == 2500
    shown = job_page.read(db, job_id, now=NOW + 2 * HOUR)
    assert shown is not None and (shown.cost_cents, shown.forecast_cents) == (1000, 2500)
    assert [(one.value, one.note) for one in phrases.figures(shown) if one.name == "Cost"] == [
        ("$10.00", "about $25.00 at the end")
    ]
    assert [(row.cost_cents, row.forecast_cents) for row in jobs_page.read(db, now=NOW + 2 * HOUR).jobs] == [
        (1000, 2500)
    ]


def test_a_running_job_has_a_forecast_from_its_epochs(db: Database) -> None:
    events = [
        {"phase": "GROUP_ITERATION", "event": "start", "data": {"config": {"epochs": 4, "iterations": 2}}},
        *(
            {
                "ts": (NOW + at * HOUR).isoformat(),
                "phase": "TRAINING",
                "event": "epoch_complete",
                "iteration": 1,
                "epoch": at,
            }
            for at in (1, 2)
        ),
    ]
    a_job(db, "epochs", NOW, cents=100, lines=b"".join(json.dumps(line).encode() + b"\n" for line in events))
    (line,) = page.read(db, now=NOW + 2 * HOUR).jobs
    assert line.left_s == pytest.approx(6 * 3600) and line.forecast_cents == 800


def test_what_is_unknown_is_said_to_be(db: Database, tmp_path: Path) -> None:
    a_job(db, "unpriced", NOW, cents=None, hours=1)
    a_job(db, "priced", NOW, cents=250, hours=1)
    a_job(db, "no-pace", NOW, cents=0)
    answer = page.read(db, now=NOW + HOUR)
    assert {line.name: (line.cents, line.forecast_cents) for line in answer.jobs} == {
        "unpriced": (None, None), "priced": (250, 250), "no-pace": (None, None),
    }  # fmt: skip
    (project,) = answer.projects
    assert (project.cents, project.known_cents, project.unknown_jobs) == (
        None,
        250,
        2,
    )  # 0 on this machine is only the default
    printed = ask(tmp_path, "--all").output
    assert "$2.50 and 2 of unknown price" in printed and "unknown" in printed


def test_caps_are_set_shown_and_taken_back(db: Database, tmp_path: Path) -> None:
    a_job(db, "spent", datetime.now(UTC) - HOUR, cents=4000, hours=0.5)
    printed = ask(tmp_path, "--set-cap", "lab=50.5/month", "--set-cap", "lab=$1000/total", "--all")
    assert printed.exit_code == 0 and "$50.50" in printed.output and "40%" in printed.output
    with db.read() as conn:
        assert [(row.period, row.cap_cents) for row in costs.list_budgets(conn)] == [
            ("month", 5050),
            ("total", 100_000),
        ]
    assert ask(tmp_path, "--set-cap", "lab=none/total").exit_code == 0
    with db.read() as conn:
        assert [row.period for row in costs.list_budgets(conn)] == ["month"]
    assert [row.action for row in audit.list_audit(db, subject="budget:lab/total")] == ["budget.remove", "budget.set"]


def test_a_server_says_what_the_home_folder_says(db: Database, tmp_path: Path) -> None:
    job_id = a_job(db, "spent", NOW, cents=4000, hours=0.5)
    with serve(db, tmp_path) as url:
        for words in (["--month", "2026-11"], ["--all", "--project", "lab"], [job_id[:9]]):
            here = json.loads(ask(tmp_path, *words, "--json").output)
            there = json.loads(ask(tmp_path, *words, "--json", "--server", url).output)
            same = ("jobs",) if words == [job_id[:9]] else ("jobs", "projects", "budgets", "month")
            assert [there[name] for name in same] == [here[name] for name in same] and here["jobs"][0]["cents"] == 2000
        assert ask(tmp_path, "--set-cap", "lab=7/total", "--server", url).exit_code == 0
        with db.read() as conn:
            assert [(row.period, row.cap_cents) for row in costs.list_budgets(conn)] == [("total", 700)]
        for _ in range(2):
            assert ask(tmp_path, "--set-cap", "lab=none/total", "--server", url).exit_code == 0
    with db.read() as conn:
        assert costs.list_budgets(conn) == []


@pytest.mark.parametrize(
    "wrong",
    [
        ["--set-cap", "lab"],
        ["--set-cap", "lab=-1"],
        ["--set-cap", "lab=5/week"],
        ["--month", "2026-13"],
        ["x", "--all"],
    ],
)
def test_wrong_words_are_refused_before_anything_is_done(db: Database, tmp_path: Path, wrong: list[str]) -> None:
    answer = ask(tmp_path, *wrong)
    assert isinstance(answer.exception, UsageError)
    with db.read() as conn:
        assert costs.list_budgets(conn) == []


def test_sums_without_any_price_are_unknown_and_no_job_is_said(db: Database, tmp_path: Path) -> None:
    a_job(db, "unpriced", NOW, cents=None, hours=1)
    assert "$0.00" not in ask(tmp_path, "--all").output
    assert "no job of project other ran so far" in ask(tmp_path, "--all", "--project", "other").output


def test_what_a_budget_does_not_count_is_said(db: Database, tmp_path: Path) -> None:
    """A job on this machine without a price is admitted whatever was spent: its submit and the budget say so."""
    spec = tmp_path / "work" / "job.yaml"
    spec.parent.mkdir()
    spec.write_text("{name: free, project: lab, command: ['true']}")
    said = "this job has no price and does not count towards the budget of project lab"

    def submit(*words: str) -> Result:
        env = {"TRAINMASTER_HOME": str(tmp_path), "COLUMNS": "200", "TERM": "dumb"}
        result = CliRunner(env=env).invoke(build(), ["submit", str(spec), *words])
        assert result.exit_code == 0, result.output
        return result

    assert said not in submit().output, "the project has no budget"
    now = datetime.now(UTC)
    a_job(db, "spent", now - HOUR, cents=4000, hours=0.5, resources={"price_per_hour": 40})
    assert ask(tmp_path, "--set-cap", "lab=10/month", "--set-cap", "lab=20/total").exit_code == 0
    assert page.read(db).budgets[0].unknown_jobs == 0 and "without a price" not in ask(tmp_path).output
    assert said in submit().output
    assert said not in submit("resources.price_per_hour=0").output, "a price of 0 that was stated is a price"
    assert said not in submit("project=other").output
    with serve(db, tmp_path) as url:
        assert said in submit("--server", url).output
        assert said in json.loads(submit("--server", url, "--json").stdout)["note"]
    a_job(db, "free", now - HOUR, cents=0, hours=0.5)
    a_job(db, "unknown", now - timedelta(days=62), cents=None, hours=0.5)  # of another month
    answer = page.read(db, month=now)
    assert [(row.period, row.spent_cents, row.unknown_jobs) for row in answer.budgets] == [
        ("month", 2000, 1), ("total", 2000, 2),
    ]  # fmt: skip
    printed = ask(tmp_path).output
    assert "$20.00 and 1 job without a price" in printed and "$20.00 and 2 jobs without a price" in printed


def test_a_whole_month_is_exported_without_a_limit(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.store.page_rows.cost_rows._BATCH", 2)
    for name in ("one", "two", "three", "four", "five"):
        a_job(db, name, NOW, cents=100, hours=0.5, resources={"processes_per_node": 4})
    free = a_job(db, "free", NOW, cents=0, hours=1)
    with db.write() as conn:
        conn.execute(tables.jobs.update().where(tables.jobs.c.id == free).values(submitted_by="\u200b=1+1"))
    a_job(db, "earlier", NOW - timedelta(days=40), cents=100, hours=1)
    file = tmp_path / "month.csv"

    def export(*words: str) -> list[dict[str, str]]:
        assert ask(tmp_path, "--csv", str(file), *words).exit_code == 0
        return list(csv.DictReader(file.read_text().splitlines()))

    jobs = export("--month", "2026-11")
    assert [row["job"] for row in jobs] == ["one", "two", "three", "four", "five", "free"]
    assert {**jobs[0], "id": ""} == {
        "project": "lab", "person": "local", "target": "local", "job": "one", "id": "", "status": "completed",
        "reason": "", "attempts": "1", "gpu_hours": "2.0", "cost_usd": "0.5", "attempts_without_price": "0",
    }  # fmt: skip
    assert jobs[-1]["person"].startswith("'") and jobs[-1]["person"].endswith("=1+1")
    assert (jobs[-1]["cost_usd"], jobs[-1]["attempts_without_price"]) == ("", "1"), "nobody stated a price"
    sums = export("--month", "2026-11", "--sums")
    names = ("project", "attempts", "gpu_hours", "cost_usd", "attempts_without_price")
    assert [tuple(row[name] for name in names) for row in sums] == [
        ("lab", "5", "10.0", "2.5", "0"), ("lab", "1", "1.0", "", "1"),
    ]  # fmt: skip
    assert len(export("--all")) == 7 and export("--project", "other", "--month", "2026-11") == []
    text = file.with_name("same.csv")
    with serve(db, tmp_path) as url:
        assert ask(tmp_path, "--csv", str(text), "--month", "2026-11", "--server", url).exit_code == 0
    export("--month", "2026-11")
    assert text.read_bytes() == file.read_bytes()
    assert ask(tmp_path, "--csv", "-", "--month", "2026-11").stdout == file.read_text()
