"""Sets of runs over REST and on the pages: the roles of jobs, one row in Runs, one page with the table, one cancel."""

from __future__ import annotations

import re
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from control.search_rows import end, report
from pages import samples
from trainmaster.control.queueing import sets
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.events import Event
from trainmaster.core.roles import Role
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import sets as pages
from trainmaster.store import tables
from trainmaster.store.capacity import searches
from trainmaster.store.capacity import sets as store
from trainmaster.store.database import Database
from trainmaster.store.jobs import list_ids
from trainmaster.web.app import create_app
from trainmaster.web.routes import sets as route
from web.conftest import BASE, LOCAL
from web.furnished import NOBODY, issue

BODY: dict[str, Any] = {
    "name": "lr", "command": ["train", "{size}"], "parallel": 1, "matrix": {"size": ["<s>", "l"], "env.SEED": ["1"]},
}  # fmt: skip


@pytest.fixture
def tokens(db: Database) -> dict[str, dict[str, str]]:
    roles = {"user": (Role.USER, "lab"), "viewer": (Role.VIEWER, "lab"), "stranger": (Role.USER, "other")}
    return {name: issue(db, name, *rights) for name, rights in roles.items()}


def test_a_set_is_submitted_shown_and_cancelled_by_its_project_alone(
    db: Database, tmp_path: Path, tokens: dict[str, dict[str, str]]
) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True, trust_jobs=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        assert client.post("/v1/sets", json=BODY, headers=tokens["viewer"]).status_code == 403
        assert client.post("/v1/sets", json={**BODY, "project": "x"}, headers=tokens["user"]).status_code == 403
        bad = client.post("/v1/sets", json={**BODY, "matrix": {"size": []}}, headers=tokens["user"])
        assert (bad.status_code, bad.json()["error"]["faults"][0]["path"]) == (422, "matrix.size")
        nul = client.post("/v1/sets", json={**BODY, "matrix": {"size": ["\x00"]}}, headers=tokens["user"])
        assert nul.status_code == 422 and client.post("/v1/sets", json=[], headers=tokens["user"]).status_code == 422
        assert store.list_sets(db) == []
        made = client.post("/v1/sets", json=BODY, headers=tokens["user"])
        assert made.status_code == 201, made.text
        line = made.json()["set"]
        assert (line["project"], line["trials"], line["submitted_by"]) == ("lab", 2, "user")
        sets.advance(db)
        (job,) = list_ids(db)
        page = f"/sets/{line['id']}"
        for path in (f"/v1{page}", page):
            seen = client.get(path, headers=tokens["viewer"])
            assert seen.status_code == 200 and job in seen.text
            assert client.get(path, headers=tokens["stranger"]).status_code == 404
        assert "&lt;s&gt;" in client.get(page, headers=tokens["viewer"]).text
        runs = client.get("/", headers=tokens["viewer"]).text
        assert f'href="{page}"' in runs and f"/jobs/{job}" not in runs, "one row"
        assert ">All 1 run, 1 line</a>" in runs
        assert f"/jobs/{job}" in client.get("/?find=lr", headers=tokens["viewer"]).text
        assert client.get("/v1/training/jobs?alone=1", headers=tokens["user"]).json()["jobs"] == []
        assert line["id"] not in client.get("/", headers=tokens["stranger"]).text
        assert client.get("/v1/sets", headers=tokens["stranger"]).json() == {"sets": []}
        assert [one["id"] for one in client.get("/v1/sets?find=lr", headers=tokens["user"]).json()["sets"]] == [
            line["id"]
        ]
        assert client.post(f"{page}/cancel", headers=tokens["viewer"]).status_code == 403
        assert client.post(f"/v1{page}/cancel", headers=tokens["stranger"]).status_code == 404
        assert client.post(f"/v1{page}/cancel", headers=tokens["user"]).json()["set"]["status"] == "cancelling"
        assert client.post(f"{page}/cancel", headers=tokens["user"]).status_code == 303
        end(db, job, Status.CANCELLED)
        over = client.post(f"/v1{page}/cancel", headers=tokens["user"])
        assert (over.status_code, over.json()["error"]["code"]) == (400, "already_final")
        assert "is already cancelled; there is nothing to cancel" in over.text
    assert store.list_sets(db)[0].cancel_at is not None


def test_a_project_submits_a_set_only_to_what_was_granted(
    db: Database, tmp_path: Path, tokens: dict[str, dict[str, str]]
) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    matrix = {"target": ["lambda", f"ssh:{tmp_path}/hosts.yaml"]}
    with TestClient(app, base_url=BASE, client=LOCAL) as client:
        for body in (BODY, {**BODY, "command": ["x"], "matrix": matrix}):
            assert client.post("/v1/sets", json=body, headers=tokens["user"]).status_code == 403
    assert store.list_sets(db) == []


def test_the_list_says_of_a_set_what_its_own_page_says(db: Database) -> None:
    """The list is summed from few queries, the page from every trial: both are the same line."""
    values = [str(number) for number in range(6)]
    own = {"name": "of-six", "project": "lab", "command": ["x"], "parallel": 6, "matrix": {"env.A": values}}
    six = sets.submit_set(db, parse_sweep({**own, "target": "slurm"}))
    free = sets.submit_set(db, parse_sweep({**own, "name": "free", "matrix": {"env.A": ["1"]}}))
    cancelled = sets.submit_set(db, parse_sweep({**own, "name": "cancelled", "parallel": 1}))
    ends = {
        1: (Status.COMPLETED, 3.0),
        2: (Status.COMPLETED, 2.0),
        3: (Status.FAILED, 1.0),
        4: (Status.COMPLETED, None),
    }
    for number, (status, loss) in ends.items():
        story = samples.Story(db, samples.spec(name=f"t-{number}", project="lab", target="slurm")).start()
        story.move(Stage.RUNNING)
        if loss is not None:
            story.tell([Event(phase="STEP", event="metrics", data={"step": 1, "loss": loss})])
        reason = None if status is Status.COMPLETED else Reason.SCRIPT_FAILED
        story.end_attempt(reason).finish(status, reason)
        with db.write() as conn:
            conn.execute(update(tables.attempts).where(tables.attempts.c.id == story.attempt).values(
                price_cents_per_hour=36_000.0 * number))  # fmt: skip
            assert store.take_trial(conn, six.id, number, story.id)
    running = samples.Story(db, samples.spec(name="t-7", project="lab")).start()
    with db.write() as conn:
        assert store.take_trial(conn, six.id, 5, NOBODY), "its job was deleted"
        conn.execute(update(tables.attempts).where(tables.attempts.c.id == running.attempt).values(
            price_cents_per_hour=0.0))  # fmt: skip
        assert store.take_trial(conn, free.id, 1, running.id)
        store.request_cancel(conn, cancelled.id, at=samples.T0)
    now = datetime(2026, 3, 2, tzinfo=UTC)
    listed = {line.id: line for line in pages.read(db, now=now).sets}
    alone = {each: pages.read_one(db, each, now=now) for each in (six.id, free.id, cancelled.id)}
    assert listed == {each: page.set for each, page in alone.items() if page is not None}
    line = listed[six.id]
    assert line.best_loss == 2.0 and line.counts == {"completed": 3, "failed": 1, "deleted": 1, "waiting": 1}
    assert line.cost_cents and listed[free.id].cost_cents is None and listed[cancelled.id].counts == {"skipped": 6}


@pytest.mark.parametrize(("cents_each", "in_all"), [(0.1, 0.3), (0.4, 1), (1.4, 4)])
def test_the_cost_of_a_set_is_summed_before_it_is_rounded(db: Database, cents_each: float, in_all: float) -> None:
    values = {"name": "three", "command": ["x"], "target": "slurm", "matrix": {"env.A": ["1", "2", "3"]}}
    three = sets.submit_set(db, parse_sweep(values))
    for number in (1, 2, 3):
        story = samples.Story(db, samples.spec(name=f"t-{number}", target="slurm"), at=samples.T0).start()
        with db.write() as conn:
            conn.execute(update(tables.attempts).where(tables.attempts.c.id == story.attempt).values(
                price_cents_per_hour=cents_each, created_at=samples.T0))  # fmt: skip
            assert store.take_trial(conn, three.id, number, story.id)
    page = pages.read_one(db, three.id, now=samples.T0 + timedelta(hours=1))
    assert page is not None and page.set.cost_cents == in_all
    assert {trial.cost_cents for trial in page.trials} == {1 if cents_each > 1 else cents_each}
    (line,) = pages.read(db, now=samples.T0 + timedelta(hours=1)).sets
    assert line.cost_cents == in_all


def test_a_search_over_rest_and_on_its_page(db: Database, tmp_path: Path, tokens: dict[str, dict[str, str]]) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True, trust_jobs=True)
    parameters = {"size": ["<s>", "l"], "env.SEED": ["1", "2"]}
    body = {key: value for key, value in BODY.items() if key != "matrix"}
    body |= {
        "search": {"parameters": parameters, "sampler": "grid", "metric": "eval/acc", "goal": "max"},
        "parallel": 4,
    }
    user = tokens["user"]
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        bad = client.post("/v1/sets", json={**body, "search": {"parameters": {"size": {"int": [2, 1]}}}}, headers=user)
        assert bad.status_code == 422
        assert "search.parameters.size" in [fault["path"] for fault in bad.json()["error"]["faults"]]
        assert client.post("/v1/sets", json=body, headers=tokens["viewer"]).status_code == 403
        made = client.post("/v1/sets", json=body, headers=user)
        assert made.status_code == 201, made.text
        line = made.json()["set"]
        assert (line["project"], line["trials"], line["counts"], made.json()["trials"]) == (
            "lab",
            4,
            {"waiting": 4},
            [],
        )
        sets.advance(db)
        for trial in store.list_trials(db, line["id"]):
            report(db, trial.job_id or "", (1, trial.number / 8), phase="EVAL_MODEL", name="acc")
            end(db, trial.job_id or "")
        sets.advance(db)
        page = client.get(f"/v1/sets/{line['id']}", headers=tokens["viewer"]).json()
        assert [trial["value"] for trial in page["trials"]] == [0.125, 0.25, 0.375, 0.5]
        assert [trial["best"] for trial in page["trials"]] == [False, False, False, True]
        assert (page["set"]["status"], page["set"]["search"]) == ("completed", "grid, seed 0")
        assert client.get("/v1/sets", headers=tokens["viewer"]).json()["sets"] == [page["set"]]
        html = client.get(f"/sets/{line['id']}", headers=tokens["viewer"]).text
        assert "best eval/acc" in html and "grid, seed 0, max eval/acc" in html and "&lt;s&gt;" in html
        assert {trial["values"]["size"] for trial in page["trials"]} == {"<s>", "l"}
    assert store.list_unfinished(db) == []
    row = searches.find_search(db, line["id"])
    assert row is not None and row.template["project"] == "lab", "of the token, as it states none"


def test_the_page_of_a_set_leads_to_a_comparison_of_its_runs(
    db: Database, tmp_path: Path, tokens: dict[str, dict[str, str]]
) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True, trust_jobs=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        made = client.post("/v1/sets", json={**BODY, "parallel": 2}, headers=tokens["user"]).json()["set"]
        assert 'id="to-compare"' not in client.get(f"/sets/{made['id']}", headers=tokens["viewer"]).text
        sets.advance(db)
        link = re.search(
            r'id="to-compare" href="([^"]+)"', client.get(f"/sets/{made['id']}", headers=tokens["viewer"]).text
        )
        assert link is not None and set(link[1].partition("jobs=")[2].split(",")) == set(list_ids(db))
        assert "What differs" in client.get(link[1], headers=tokens["viewer"]).text


def test_a_schedule_is_paused_resumed_and_shown(
    db: Database, tmp_path: Path, tokens: dict[str, dict[str, str]]
) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True, trust_jobs=True)
    body = {"name": "nightly", "command": ["x"], "schedule": {"cron": "0 3 * * mon-fri", "timezone": "Asia/Tokyo"}}
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        bad = client.post("/v1/sets", json={**body, "schedule": {"cron": "0 3 * * 9"}}, headers=tokens["user"])
        assert (bad.status_code, bad.json()["error"]["faults"][0]["path"]) == (422, "schedule.cron")
        made = client.post("/v1/sets", json=body, headers=tokens["user"])
        assert made.status_code == 201, made.text
        line = made.json()["set"]
        assert (line["schedule"], line["status"], line["trials"]) == ("0 3 * * mon-fri Asia/Tokyo", "pending", 0)
        assert line["next_at"] is not None and line["paused"] is False
        page = f"/sets/{line['id']}"
        shown = client.get(page, headers=tokens["user"]).text
        assert "0 3 * * mon-fri Asia/Tokyo" in shown and "No run has begun yet." in shown and "Pause schedule" in shown
        assert line["next_at"][:10] in shown and line["next_at"][:10] in client.get("/", headers=tokens["user"]).text
        assert "Pause schedule" not in client.get(page, headers=tokens["viewer"]).text
        for how in ("pause", "resume"):
            assert client.post(f"/v1{page}/{how}", headers=tokens["viewer"]).status_code == 403
            assert client.post(f"/v1{page}/{how}", headers=tokens["stranger"]).status_code == 404
            assert client.post(f"{page}/{how}", headers=tokens["viewer"]).status_code == 403
        paused = client.post(f"/v1{page}/pause", headers=tokens["user"]).json()["set"]
        assert (paused["paused"], paused["next_at"], paused["status"]) == (True, None, "pending")
        assert "Resume schedule" in client.get(page, headers=tokens["user"]).text
        assert client.post(f"{page}/resume", headers=tokens["user"]).status_code == 303
        assert client.get(f"/v1{page}", headers=tokens["user"]).json()["set"]["next_at"] == line["next_at"]
        assert client.post(f"{page}/pause", headers=tokens["user"]).status_code == 303
        assert client.post(f"/v1{page}/cancel", headers=tokens["user"]).json()["set"]["status"] == "cancelled"
        refused = client.post(f"/v1{page}/resume", headers=tokens["user"])
        assert refused.status_code == 409 and "cancelled" in refused.text
        matrix = client.post("/v1/sets", json=BODY, headers=tokens["user"]).json()["set"]["id"]
        assert client.post(f"/v1/sets/{matrix}/pause", headers=tokens["user"]).status_code == 409


def test_large_submissions_take_turns_and_the_rest_is_told_to_wait(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are checked at once, eight wait, the others come later; other requests are answered meanwhile."""
    app = create_app(db, tmp_path, reconcile=False)
    going, most, gate = 0, 0, threading.Event()
    submit = route._submit

    def slow(*args: Any) -> Any:
        nonlocal going, most
        going += 1
        most = max(most, going)
        assert gate.wait(20)
        going -= 1
        return submit(*args)

    monkeypatch.setattr(route, "_submit", slow)
    with TestClient(app, base_url=BASE, client=LOCAL) as client, ThreadPoolExecutor(14) as pool:
        answers = [pool.submit(client.post, "/v1/sets", json=BODY) for _ in range(14)]
        refused, _ = wait(answers, timeout=10, return_when=FIRST_COMPLETED)
        assert {answer.result().status_code for answer in refused} == {503}
        assert all(answer.result().headers["retry-after"] for answer in refused)
        assert client.get("/healthz").status_code == 200
        gate.set()
        codes = [answer.result().status_code for answer in answers]
    assert (sorted(set(codes)), codes.count(201), most) == ([201, 503], 10, 2)


def test_a_set_that_a_request_multiplies_too_far_is_refused_with_the_limit(db: Database, tmp_path: Path) -> None:
    app = create_app(db, tmp_path, reconcile=False)
    body = {
        "name": "b",
        "command": ["true", "{x}"],
        "matrix": {"x": list(range(1000))},
        "env": {"PAD": "z y" * 300_000},
    }
    with TestClient(app, base_url=BASE, client=LOCAL) as client:
        answer = client.post("/v1/sets", json=body)
        assert answer.status_code == 422 and "16,777,216" in answer.json()["error"]["faults"][0]["message"]
        tiny = {"parameters": {"x": {"float": [0, 1], "step": 1e-300}}, "trials": 2}
        answer = client.post("/v1/sets", json={"name": "b", "command": ["true", "{x}"], "search": tiny})
        assert (answer.status_code, answer.json()["error"]["faults"][0]["path"]) == (422, "search.parameters.x.step")
    assert store.list_sets(db) == []


def test_a_key_makes_one_set_however_often_it_is_sent(
    db: Database, tmp_path: Path, tokens: dict[str, dict[str, str]]
) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True, trust_jobs=True)
    key = {"Idempotency-Key": "nightly"}
    with TestClient(app, base_url=BASE, client=LOCAL) as client:
        made, again = (client.post("/v1/sets", json=BODY, headers={**tokens["user"], **key}) for _ in range(2))
        assert (made.status_code, again.status_code) == (201, 200) and made.json() == again.json()
        other = client.post("/v1/sets", json={**BODY, "parallel": 2}, headers={**tokens["user"], **key})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "key_taken")
        assert f"stands for set {made.json()['set']['id']}" in other.text
        elsewhere = client.post("/v1/sets", json=BODY, headers={**tokens["stranger"], **key})
        assert elsewhere.status_code == 201, "a key is of a project"
        assert client.post("/v1/sets", json=BODY, headers=tokens["user"]).status_code == 201
        bad = client.post("/v1/sets", json=BODY, headers={**tokens["user"], "Idempotency-Key": "a b"})
        assert bad.status_code in (400, 422)
    assert len(store.list_sets(db)) == 3


def test_a_text_that_all_trials_share_is_looked_at_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sets, "recognise", seen.append)
    body = {"name": "b", "command": ["true", "{x}"], "matrix": {"x": list(range(20))}, "env": {"PAD": "z y" * 1000}}
    sets.submit_set(db, parse_sweep(body))
    assert seen.count("z y" * 1000) == 1 and seen.count("19") == 1
