"""The priority of a waiting job: changed on its page, by the API and the command line, by who may submit such a job."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from playwright.sync_api import Page, expect
from starlette.testclient import TestClient
from typer.testing import CliRunner

from client.served import serve
from pages import samples
from trainmaster.cli.main import build
from trainmaster.control import known_targets
from trainmaster.control.queueing import priority as priorities
from trainmaster.core.config.queue import PRIORITIES
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage, Status
from trainmaster.store import audit, jobs, leases
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.routes.jobs import PriorityBody
from web.conftest import BASE, LOCAL
from web.furnished import JOBS, issue, serving

PEOPLE = {
    "viewer": (Role.VIEWER, "lab"), "stranger": (Role.USER, "other"), "user": (Role.USER, "lab"),
    "project admin": (Role.ADMIN, "lab"), "server admin": (Role.ADMIN, None),
}  # fmt: skip


@pytest.fixture
def guarded(db: Database, tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(db, tmp_path, reconcile=False, require_token=True, trust_jobs=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        yield client


def wanted(db: Database, job: str) -> str:
    row = jobs.find_job(db, job)
    assert row is not None
    return row.spec.queue.priority


@pytest.mark.parametrize("person", PEOPLE)
def test_only_who_may_submit_such_a_job_changes_it(db: Database, guarded: TestClient, person: str) -> None:
    job, placed = samples.pending(db, project="lab").id, samples.Story(db, samples.spec(project="lab")).start().id
    guarded.headers.update(issue(db, "ann", *PEOPLE[person]))
    status = {"viewer": 403, "stranger": 404}.get(person)
    answer = guarded.put(f"{JOBS}/{job}/priority", json={"priority": "high"})
    assert answer.status_code == (status or 200)
    assert wanted(db, job) == ("normal" if status else "high")
    assert status or answer.json()["spec"]["queue"]["priority"] == "high"
    assert guarded.post(f"/jobs/{job}/priority", data={"priority": "urgent"}).status_code == (status or 303)
    assert wanted(db, job) == ("normal" if status else "urgent")
    shown = guarded.get(f"/jobs/{job}")
    if person == "stranger":
        unknown = guarded.put(f"{JOBS}/{samples.spec().name}/priority", json={"priority": "high"})
        assert (answer.json()["error"]["code"], unknown.status_code) == ("not_found", 404)
        assert answer.json()["error"]["message"] == f"no job {job}", "as one that there is not"
    else:
        assert (f'action="/jobs/{job}/priority"' in shown.text) == (status is None)
        assert ("<dt>Priority</dt><dd>normal</dd>" in shown.text) == (person == "viewer")
    refused = guarded.put(f"{JOBS}/{placed}/priority", json={"priority": "high"})
    assert refused.status_code == (status or 409)
    if status is None:
        assert refused.json()["error"]["code"] == "not_waiting" and "has its machines already" in refused.text
    changes = [(entry.who, entry.detail) for entry in audit.list_audit(db) if entry.action == "job.priority"]
    made = [("ann", {"from": "high", "to": "urgent"}), ("ann", {"from": "normal", "to": "high"})]
    assert changes == ([] if status else made)


def test_where_its_project_may_not_submit_it_may_not_change(db: Database, tmp_path: Path) -> None:
    job = samples.pending(db, project="lab", target="lambda").id
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        client.headers.update(issue(db, "ann", Role.USER, "lab"))
        for path, sent in ((f"{JOBS}/{job}/priority", "put"), (f"/jobs/{job}/priority", "post")):
            body = {"json": {"priority": "high"}} if sent == "put" else {"data": {"priority": "high"}}
            assert client.request(sent, path, **body).status_code == 403  # type: ignore[arg-type]
        assert wanted(db, job) == "normal"
        known_targets.grant(db, "lambda", "lab", user=None, by="local")
        assert client.put(f"{JOBS}/{job}/priority", json={"priority": "high"}).status_code == 200
    assert wanted(db, job) == "high"


def test_the_page_changes_it_and_the_queue_shows_it_at_once(db: Database, client: TestClient) -> None:
    first, second = samples.pending(db, name="first").id, samples.pending(db, name="second").id
    with db.write() as conn:
        leases.take(conn, "t", owner="a test")
    assert sorted(re.findall(r'id="q-([^"]+)"', client.get("/queue").text)) == sorted([first, second])
    form = client.get(f"/jobs/{second}").text.partition(f'action="/jobs/{second}/priority"')[2].partition("</form>")[0]
    assert re.findall(r"<option( selected)?>(\w+)<", form) == [
        (" selected" if word == "normal" else "", word) for word in PRIORITIES
    ]
    answer = client.post(f"/jobs/{second}/priority", data={"priority": "high"})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{second}")
    rows = re.findall(r'id="q-([^"]+)".*?data-name="priority">(\w+)', client.get("/queue").text)
    assert sorted(rows) == sorted([(first, "normal"), (second, "high")]), "not what was kept from before"
    assert "<option selected>high<" in client.get(f"/jobs/{second}/part").text
    assert 'priority">high' not in client.get(f"/jobs/{first}").text
    for typed in ({}, {"priority": ""}, {"priority": "soon"}):
        assert client.post(f"/jobs/{second}/priority", data=typed).status_code == 422
        assert client.put(f"{JOBS}/{second}/priority", json=typed).status_code == 422
    foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    assert client.post(f"/jobs/{second}/priority", data={"priority": "low"}, headers=foreign).status_code == 403
    assert wanted(db, second) == "high"


@pytest.mark.proof
def test_in_a_browser_a_choice_stays_while_the_page_is_kept_current(tab: Page, db: Database, tmp_path: Path) -> None:
    job = samples.pending(db).id
    with db.write() as conn:
        leases.take(conn, "t", owner="a test")
    with serving(create_app(db, tmp_path, reconcile=False)) as url:
        tab.set_viewport_size({"width": 360, "height": 740})
        tab.goto(f"{url}/queue")
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url) if request.url.endswith("/part") else None)
        with tab.expect_response("**/part"):  # each two seconds
            tab.goto(f"{url}/jobs/{job}")
        tab.locator("#priority").focus()
        tab.select_option("#priority", "urgent")
        asked.clear()
        priorities.change(db, job, "low")
        tab.wait_for_timeout(4_500)
        assert (tab.locator("#priority").input_value(), asked) == ("urgent", [])
        assert tab.locator("main").evaluate("(main) => main.scrollWidth - main.clientWidth") <= 0
        tab.locator("#set-priority").click()
        tab.wait_for_url(f"{url}/jobs/{job}")
        expect(tab.locator("#priority")).to_have_value("urgent")
        tab.goto("about:blank")
    assert wanted(db, job) == "urgent"


def test_a_job_that_does_not_wait_in_our_queue_has_no_form(db: Database, client: TestClient) -> None:
    slurm = samples.pending(db, target="slurm").id
    text = client.get(f"/jobs/{slurm}").text
    assert f'action="/jobs/{slurm}/priority"' not in text and "<dt>Priority</dt><dd>normal</dd>" in text
    answer = client.post(f"/jobs/{slurm}/priority", data={"priority": "high"})
    assert answer.status_code == 409 and "whose jobs do not wait in the server" in answer.text
    running = samples.Story(db).start().move(Stage.RUNNING)
    assert "/priority" not in client.get(f"/jobs/{running.id}").text
    cancelled = samples.pending(db).id
    client.post(f"/jobs/{cancelled}/cancel")
    assert "/priority" not in client.get(f"/jobs/{cancelled}").text
    over = samples.completed(db).id
    answer = client.post(f"/jobs/{over}/priority", data={"priority": "high"})
    assert answer.status_code == 409 and f"is already {Status.COMPLETED}" in answer.text


def test_the_words_of_the_api_are_those_of_the_spec() -> None:
    assert get_args(PriorityBody.model_fields["priority"].annotation) == PRIORITIES


@pytest.mark.parametrize("served", [False, True])
def test_the_command_line_changes_it(db: Database, tmp_path: Path, served: bool) -> None:
    story, other = samples.pending(db, name="trial"), samples.completed(db)

    def ask(*words: str) -> str:
        result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(build(), ["queue", *words, *where])
        if isinstance(result.exception, TrainmasterError):
            return str(result.exception)
        assert result.exit_code == 0, result.output
        return result.output

    with contextlib.ExitStack() as stack:
        where = ["--server", stack.enter_context(serve(db, tmp_path))] if served else ["--home", str(tmp_path)]
        assert f"trial {story.id} has the priority high" in ask("--set-priority", "trial=high")
        assert wanted(db, story.id) == "high"
        assert "has the priority low" in ask("--set-priority", f"{story.id[:8]}=urgent", "--set-priority", "trial=low")
        assert "is already completed" in ask("--set-priority", f"{other.id}=high")
        for wrong in ("trial", "trial=", "=high", "trial=soon"):
            assert f"--set-priority {wrong}: write JOB=PRIORITY" in ask("--set-priority", wrong)
        assert "no job 'nothing'" in ask("--set-priority", "trial=urgent", "--set-priority", "nothing=high")
        assert wanted(db, story.id) == "low", "of several none is changed where one is not found"
    (last, *_) = [entry for entry in audit.list_audit(db) if entry.action == "job.priority"]
    assert (last.who, last.detail) == ("loopback" if served else "local", {"from": "urgent", "to": "low"})
