"""Attacks on priorities, comparisons, pre-flights of several machines, searches and kept sums: all are withstood."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster.control.queueing import priority
from trainmaster.core.config.queue import PRIORITIES
from trainmaster.core.errors import NotWaiting
from trainmaster.core.events import Event, split
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage
from trainmaster.store import attempts, audit, jobs, tables, tokens
from trainmaster.store.database import Database
from trainmaster.store.events import append_events
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.furnished import JOBS, NOBODY, issue, read_page
from web.test_cost_page import HOUR
from web.test_cost_page import run as run_at

HOSTILE_NODES = ["<script>alert(1)</script>", "a\u202eb\x1b[31m", "'\"><img src=x>"]


def wanted(db: Database, job: str) -> str:
    row = jobs.find_job(db, job)
    assert row is not None
    return row.spec.queue.priority


@pytest.mark.parametrize(
    "body",
    ['{"priority":["high"]}', '{"priority":1}', '{"priority":"HIGH"}', '{"priority":"high","by":"root"}', "[]", "NaN",
     "", '{"priority":"high\\u0000"}', '{"priority":"\\ud800"}', "[" * 900, '{"priority":' + "9" * 4_300 + "}"],
)  # fmt: skip
def test_an_odd_priority_is_refused_and_changes_nothing(client: TestClient, db: Database, body: str) -> None:
    job = samples.pending(db).id
    answer = client.put(f"{JOBS}/{job}/priority", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422) and wanted(db, job) == "normal"
    for path in (job.upper(), NOBODY, "%00", "x"):
        assert client.put(f"{JOBS}/{path}/priority", json={"priority": "high"}).status_code == 404
    assert [entry.action for entry in audit.list_audit(db) if entry.action == "job.priority"] == []


def test_a_repeated_submission_is_the_same_job_after_its_priority_changed(client: TestClient, db: Database) -> None:
    sent: dict[str, Any] = {"json": {"name": "x", "command": ["x"]}, "headers": {"Idempotency-Key": "k"}}
    job = client.post(JOBS, **sent).json()["id"]
    assert client.put(f"{JOBS}/{job}/priority", json={"priority": "high"}).status_code == 200
    again = client.post(JOBS, **sent)
    assert (again.status_code, again.json()["id"], wanted(db, job)) == (200, job, "high")


@pytest.mark.parametrize("queue", [[], "x", {"priority": 7}, {"priority": None}])
def test_the_priority_of_a_job_that_cannot_be_read_is_not_changed(
    client: TestClient, db: Database, queue: object
) -> None:
    job = samples.pending(db).id
    row = tables.jobs.c.id == job
    with db.write() as conn:
        spec = conn.execute(tables.jobs.select().where(row)).mappings().one()["spec"]
        conn.execute(tables.jobs.update().where(row).values(spec={**spec, "queue": queue}))
    assert client.put(f"{JOBS}/{job}/priority", json={"priority": "high"}).status_code == 409
    with db.read() as conn:
        assert conn.execute(tables.jobs.select().where(row)).mappings().one()["spec"]["queue"] == queue


@pytest.mark.both_databases
def test_two_who_change_priorities_while_jobs_are_placed_leave_a_whole_trail(db: Database) -> None:
    ids = [samples.pending(db).id for _ in range(6)]
    placed: dict[str, str] = {}

    def change(who: str, first: int) -> None:
        for number in range(24):
            job, word = ids[(first + number) % len(ids)], PRIORITIES[(first + number) % len(PRIORITIES)]
            with contextlib.suppress(NotWaiting):
                priority.change(db, job, word, by=who)

    def place() -> None:
        for job in ids:
            with db.write() as conn:
                assert jobs.advance(conn, job, seen=Stage.QUEUED, to=Stage.PLACING, at=datetime.now(UTC))
            placed[job] = wanted(db, job)

    threads = [threading.Thread(target=change, args=(who, n)) for n, who in enumerate(("ann", "bob"))]
    for thread in (*threads, last := threading.Thread(target=place)):
        thread.start()
    for thread in (*threads, last):
        thread.join()
    for job in ids:
        assert wanted(db, job) == placed[job], "none was changed once it was placed"
        at = "normal"
        for entry in reversed(audit.list_audit(db, subject=f"job:{job}", limit=1000)):
            if entry.action == "job.priority":
                assert entry.detail is not None and entry.detail["from"] == at
                at = entry.detail["to"]
        assert at == placed[job]


def test_a_table_of_a_project_has_no_run_of_another(db: Database, tmp_path: Path) -> None:
    ours, theirs = (samples.completed(db, project=project).id for project in ("lab", "other"))
    with TestClient(
        create_app(db, tmp_path, reconcile=False, require_token=True), base_url=BASE, client=LOCAL
    ) as client:
        client.headers.update(issue(db, "ann", Role.VIEWER, "lab"))
        asked = {"jobs": f"{theirs},{ours},{NOBODY},{ours}", "job": [theirs], "sort": ":cost"}
        answer = client.get("/compare.csv", params=asked)
        assert [row["id"] for row in csv.DictReader(io.StringIO(answer.text))] == [ours]
        assert theirs not in answer.text and "other" not in answer.text
        assert client.get("/compare/curves", params={"jobs": theirs}).json() == {"curves": []}
        assert "2 of the chosen runs are not there, or of a project" in client.get("/compare", params=asked).text


@pytest.mark.parametrize(
    "odd",
    [{"sort": "\x00"}, {"sort": "--loss"}, {"sort": ":nothing"}, {"metric": "\x00"}, {"group": "\x00"},
     {"find": "\x00"}, {"jobs": "x" * 60_000}, {"without": "\ufffd"}, {"sort": "nan"}, {"sort": "big"}],
)  # fmt: skip
def test_an_odd_question_of_a_comparison_has_an_answer(client: TestClient, db: Database, odd: dict[str, str]) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    line = b'{"phase":"STEP","event":"metrics","data":{"step":4,"loss":1e400,"nan":NaN,"big":' + b"9" * 4_200 + b"}}\n"
    story.tell([line])
    for path in ("/compare", "/compare.csv"):
        assert client.get(path, params={"jobs": story.id, **odd}).status_code == 200


def test_hostile_names_and_results_of_machines_are_text(client: TestClient, db: Database) -> None:
    story = samples.Story(db, samples.spec(target="slurm")).start()
    with db.write() as conn:
        attempts.set_handle(conn, story.attempt, {"nodes": HOSTILE_NODES})
    findings: list[Any] = [
        "none", [], [7, None, {}], [{"verdict": ["a"], "reason": {"a": 1}, "values": [1]}],
        [{"verdict": "fail", "reason": "<img src=x>\x00\x1b[31m [/INST]", "device": "\u202egpu", "action": "<script>",
          "values": {"<b>": float("nan"), "w": [{}] * 50, "serial": "1" * 4200}}],
    ]  # fmt: skip
    for number in range(len(HOSTILE_NODES)):
        told = [Event(phase="PREFLIGHT", event="start", data={"planned": ["cpu", 7, None, ["a"], "<b>"]})]
        for check, found in enumerate(findings):
            data = {"check": f"<img {check}>", "verdict": "fail", "took_s": "x", "findings": found, "node": "<i>"}
            told.append(Event(phase="PREFLIGHT", event="check", data=data))
        lines = split(samples.encode(told), offset=0, zone=UTC, last=True)
        with db.write() as conn:
            assert append_events(conn, story.attempt, node_file(EVENTS_FILE, number), seen_offset=0, lines=lines)
    for path in (f"/jobs/{story.id}/preflight", f"/jobs/{story.id}", "/nodes", "/search?q=serial:11111"):
        body = read_page(client.get(path)).partition("<main")[2]
        assert not re.search("<script>alert|<script>&|<img |<b>&|<i>|[\u202e\x1b\x00]", body), path
        assert body.count('id="') == len(set(re.findall(r'id="[^"]*"', body))), path
    shown = read_page(client.get(f"/jobs/{story.id}/preflight"))
    assert "Pre-flight of 3 machines" in shown and "&lt;script&gt;alert(1)&lt;/script&gt;</a>" in shown


@pytest.mark.parametrize(
    "words",
    ["serial:", "serial: ", "serial:serial:1652", "serial:%%%%%", "serial:_____", "serial:\\", "serial:'; drop",
     "1e400", "\x00serial:\x00", "9" * 5_000, "serial:" + "9" * 5_000, "serial:N/A", "serial:[Unknown Error]"],
)  # fmt: skip
def test_odd_words_find_nothing(client: TestClient, db: Database, words: str) -> None:
    story = samples.Story(db, samples.spec(project="lab")).start()
    story.tell(
        samples.preflight([{"check": "gpu", "verdict": "fail", "reason": "x", "values": {"serial": "16529220"}}])
    )
    answer = client.get("/search", params={"q": words})
    assert answer.status_code == 200 and "/nodes/one?gpu=" not in answer.text


def test_sums_that_are_kept_are_of_who_asks_and_of_no_one_without_a_token(db: Database, tmp_path: Path) -> None:
    for project, cents in (("lab", 300), ("other", 77_700)):
        run_at(db, cents=cents, start=datetime.now(UTC) - HOUR, project=project)
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        people = {name: issue(db, name, Role.ADMIN, project) for name, project in (("root", None), ("ann", "lab"))}
        for _ in range(2):  # the second answer is from what was kept
            whole, own = (client.get("/settings", headers=people[name]).text for name in ("root", "ann"))
            assert "$777.00" in whole and "$3.00" in whole
            assert "$3.00" in own and "777.00" not in own and ">other<" not in own
        viewer = client.get("/settings", headers=issue(db, "bob", Role.USER, "lab")).text
        assert "$3.00" not in viewer, "sums are for admins"
        with db.write() as conn:
            assert tokens.revoke(conn, name="root", at=datetime.now(UTC))
        assert client.get("/settings", headers=people["root"]).status_code in (303, 401)
