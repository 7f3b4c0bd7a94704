"""What the queue and the machines show: place, reason, what is before; engines in their own words; projects apart."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from starlette.testclient import TestClient
from typer.testing import CliRunner

from pages import samples
from trainmaster.cli import _console
from trainmaster.cli.jobs import queue as cli_queue
from trainmaster.cli.main import build
from trainmaster.cluster.health.history import Entry
from trainmaster.core.results import Verdict
from trainmaster.core.roles import Role
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage, TargetState
from trainmaster.pages import machines, queue
from trainmaster.queueing.state import Device, Wait
from trainmaster.queueing.words import say_before
from trainmaster.store import attempts, audit, jobs, leases, nodes
from trainmaster.store.capacity import devices, order
from trainmaster.store.capacity import queue as capacity
from trainmaster.store.database import Database, connect
from trainmaster.store.migrate import open_database
from trainmaster.targets import find_place
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.furnished import issue

_NOW = datetime.now(UTC)
_IDS = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(6)]


def _insert(db: Database, number: int, **more: Any) -> str:
    spec = {"name": f"j{number}", "command": ["x"], **more}
    with db.write() as conn:
        jobs.insert_job(conn, _IDS[number], parse_spec(spec), at=_NOW + timedelta(seconds=number))
    return _IDS[number]


def _hold(db: Database) -> None:
    """Two GPUs of this machine, both held by job 0, and every job driven."""
    with db.write() as conn:
        listed = [Device(id=f"GPU-{number}", machine="m0", model="H200") for number in range(2)]
        devices.record(conn, find_place("local"), "gpu", listed, at=_NOW)
        attempt = attempts.insert_attempt(conn, _IDS[0], 1, handle={}, at=_NOW)
        jobs.advance(conn, _IDS[0], seen=Stage.QUEUED, to=Stage.RUNNING, at=_NOW)
        devices.book(conn, find_place("local"), attempt, {"m0": ("GPU-0", "GPU-1")}, at=_NOW)
        leases.take(conn, "t", owner="a test")


def test_each_job_has_its_place_a_reason_and_what_is_before_it(db: Database) -> None:
    ids = [_insert(db, 0), _insert(db, 1), _insert(db, 2, queue={"priority": "high"}), _insert(db, 3, project="other")]
    _hold(db)
    page = queue.read(db)
    assert [(line.job_id, line.position) for line in page.jobs] == [(ids[2], 1), (ids[3], 2), (ids[1], 3)]
    assert page.jobs[0].reason == (
        "it needs 1 GPU, none is free; what becomes free is kept for it; "
        "its start is not known: 1 running job has no limits.timeout_s"
    )
    assert page.jobs[2].before == (ids[3], ids[2])
    assert page.jobs[2].reason == "it needs 1 GPU, and none is free"
    own = queue.read(db, project="other")
    assert [(line.job_id, line.position, line.before) for line in own.jobs] == [(ids[3], 2, ())]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_on_a_terminal_the_reason_has_room(
    db: Database, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the job where the terminal is wide, else below it; names give way, numbers do not."""
    _insert(db, 0)
    _insert(db, 1, name="a-long-name-of-a-job-that-waits", queue={"priority": "high"})
    _insert(db, 2, project="other")
    _hold(db)
    monkeypatch.setattr(_console.out, "_width", width)
    cli_queue._print(queue.read(db))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and "priority" in lines[0]
    assert len(lines) == {80: 7, 120: 6, 200: 4}[width], lines
    whole = " ".join(" ".join(lines).split())
    assert "it needs 1 GPU, and none is free" in whole
    assert ("a-long-name-of-a-job-that-waits" in lines[1]) == (width > 80)


def test_a_target_that_queues_is_shown_with_its_own_reason(db: Database) -> None:
    _insert(db, 4, target="slurm")
    with db.write() as conn:
        attempts.insert_attempt(conn, _IDS[4], 1, handle={}, at=_NOW)
        jobs.advance(conn, _IDS[4], seen=Stage.QUEUED, to=Stage.CHECKING, at=_NOW)
        attempts.record_poll(conn, f"{_IDS[4]}.1", TargetState.WAITING, at=_NOW)
        jobs.set_message(conn, _IDS[4], "Resources")
    (line,) = queue.read(db).jobs
    assert (line.position, line.reason, line.target) == (None, "Resources", "slurm")


def test_who_has_a_gpu_is_named_to_its_own_project_only(db: Database) -> None:
    _insert(db, 0)
    _hold(db)
    (machine,) = machines.read(db).machines
    assert (machine.target, machine.machine, machine.verdict) == ("local", "m0", None)
    assert [(device.device, device.job, device.since) for device in machine.devices] == [
        ("GPU-0", "j0", _NOW),
        ("GPU-1", "j0", _NOW),
    ]
    (foreign,) = machines.read(db, project="other").machines
    assert {(device.job_id, device.used) for device in foreign.devices} == {(None, "a job of another project")}
    assert {(device.submitted_by, device.price_cents_per_hour) for device in foreign.devices} == {(None, None)}


def test_a_check_of_the_operator_counts_where_it_is_newer(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainmaster check` failed, and `trainmaster nodes` said pass: the pre-flight before it had passed."""
    story = samples.completed(db)
    (before,) = machines.read(db, home=tmp_path).machines
    assert (before.machine, before.verdict) == ("node-17", Verdict.WARN) and before.checked_at is not None
    late = (before.checked_at + timedelta(hours=1)).isoformat()
    entry = Entry(run="r", at=late, key="node:node-17", node="node-17", device=None, verdict=Verdict.FAIL)
    monkeypatch.setattr(machines, "read_history", lambda _: [entry])
    (after,) = machines.read(db, home=tmp_path).machines
    assert after.verdict is Verdict.FAIL and after.checked_at == datetime.fromisoformat(late)
    assert machines.read(db, project=story.spec.project).machines[0].verdict is before.verdict


def test_the_page_shows_each_project_its_own_jobs(db: Database, tmp_path: Path) -> None:
    mine, theirs = _insert(db, 0), _insert(db, 3, project="other")
    _insert(db, 1)
    _hold(db)
    tokens = [issue(db, "boss", Role.ADMIN), issue(db, "them", Role.VIEWER, "other")]
    with TestClient(create_app(db, tmp_path, reconcile=False), base_url=BASE, client=LOCAL) as client:
        whole, own = (client.get("/queue", headers=token) for token in tokens)
        part = client.get("/queue?part=1", headers=tokens[1]).text
    assert whole.status_code == own.status_code == 200
    assert all(
        word in whole.text for word in (f"/jobs/{mine}", f"/jobs/{theirs}", "2 waiting", "j1", "what becomes free")
    )
    assert f"/jobs/{theirs}" in own.text and "1 waiting" in own.text and "a job of another project" in own.text
    assert mine not in own.text and "j1" not in own.text
    assert f"/jobs/{theirs}" in part and "<html" not in part
    assert "1 job of other projects waits too" in own.text and "other projects wait" not in whole.text
    assert ">j3</td>" in whole.text and "and 1 job of other projects</td>" not in whole.text, "what is before it"


def test_a_project_without_a_job_reads_that_others_wait(db: Database, tmp_path: Path) -> None:
    for number in range(3):
        _insert(db, number)
    _hold(db)
    with TestClient(create_app(db, tmp_path, reconcile=False), base_url=BASE, client=LOCAL) as client:
        text = client.get("/queue", headers=issue(db, "them", Role.VIEWER, "other")).text
    assert "Nothing of yours waits" in text and "2 jobs of other projects do." in text and "j1" not in text


def test_before_a_job_are_names_and_the_number_of_others() -> None:
    names = {"a" * 36: "first", "b" * 36: "second"}
    assert say_before(None, (), names) == say_before(1, (), names) == ""
    assert say_before(3, ("b" * 36, "a" * 36), names) == "second, first"
    assert say_before(3, ("b" * 36,), names) == "second and 1 job of other projects"
    assert say_before(9, ("b" * 36, "c" * 36), names) == "second, cccccccc and 6 more"
    assert say_before(3, (), names) == "2 jobs of other projects" and say_before(9, (), names) == "8 jobs"


def test_show_says_the_place_of_a_job_that_waits(tmp_path: Path) -> None:
    db = open_database(tmp_path / "trainmaster.db")
    ids = [_insert(db, number) for number in range(3)]
    _hold(db)
    db.close()
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    shown = " ".join(CliRunner(env=env).invoke(build(), ["show", ids[2], "--home", str(tmp_path)]).stdout.split())
    assert "place 2 in its queue; before it: j1 waits for it needs 1 GPU, and none is free start not known" in shown


@pytest.mark.parametrize("limit_s", [None, 3600.0])
def test_a_start_that_comes_from_a_time_limit_is_said_as_one_at_the_latest(
    limit_s: float | None, tmp_path: Path
) -> None:
    """In JSON, on the page, in `queue` wide and narrow, in `show`; and in an order that was kept, as in one decided."""
    db = open_database(tmp_path / "trainmaster.db")
    limits = {} if limit_s is None else {"limits": {"timeout_s": limit_s}}
    ids = [_insert(db, 0, **limits), _insert(db, 1, resources={"processes_per_node": 2}), _insert(db, 2)]
    _hold(db)
    boss = issue(db, "boss", Role.ADMIN)
    env = {"NO_COLOR": "1", "TERM": "dumb"}

    def run(*words: str, columns: int = 200) -> str:
        more = {**env, "COLUMNS": str(columns)}
        return " ".join(CliRunner(env=more).invoke(build(), [*words, "--home", str(tmp_path)]).stdout.split())

    def check() -> None:
        lines = {line.job_id: line for line in queue.read(db).jobs}
        assert [lines[job].expected_latest for job in ids[1:]] == [limit_s is not None, False]
        assert (lines[ids[1]].expected_at is None) == (limit_s is None)
        said = [run("queue"), run("queue", columns=80), run("show", ids[1])]
        with TestClient(create_app(db, tmp_path, reconcile=False), base_url=BASE, client=LOCAL) as client:
            said.append(client.get("/queue", headers=boss).text)
            shown = client.get("/v1/queue", headers=boss).json()["jobs"]
        assert [text.count("at the latest") for text in said] == [int(limit_s is not None)] * 4
        assert {line["job_id"]: line["expected_latest"] for line in shown}[ids[1]] is (limit_s is not None)

    check()
    place, now = find_place("local"), datetime.now(UTC)
    rows = capacity.list_waiting(db, driven=False)
    order.keep(db, order.to_order(place, order.decide(db, place, rows, now=now).decisions.waits), at=now)
    check()
    order._last.clear()  # as another server reads it
    check()
    db.close()


def test_an_order_of_an_earlier_version_is_read() -> None:
    kept = order._parse("p", '{"texts":["full"],"waits":[["a",1,0,5.0]]}')
    assert kept.jobs == ["a"] and not kept.latest


def test_a_command_of_one_project_says_how_many_jobs_of_others_wait(tmp_path: Path) -> None:
    db = open_database(tmp_path / "trainmaster.db")
    for number in range(3):
        _insert(db, number)
    _insert(db, 3, project="other")
    _hold(db)
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}

    def run(*words: str) -> str:
        return " ".join(CliRunner(env=env).invoke(build(), ["queue", *words, "--home", str(tmp_path)]).output.split())

    assert "2 jobs of other projects wait too" in run("--project", "other")
    assert "1 job of other projects waits too" in run("--project", "default")
    assert "nothing of yours waits; 3 jobs of other projects wait" in run("--project", "third")
    assert "other projects wait" not in run()
    with TestClient(create_app(db, tmp_path, reconcile=False), base_url=BASE, client=LOCAL) as client:
        them, boss = issue(db, "them", Role.VIEWER, "other"), issue(db, "boss", Role.ADMIN)
        told = [
            client.get(path, headers=who).json()["others"]
            for path, who in (("/v1/queue", them), ("/v1/queue", boss), ("/v1/queue?project_id=third", boss))
        ]
    assert told == [2, 0, 3]
    db.close()


def test_an_admin_of_the_server_drains_a_machine_and_others_do_not_read_why(db: Database, tmp_path: Path) -> None:
    _insert(db, 0)
    _insert(db, 1, project="other")
    _hold(db)
    boss, lab = issue(db, "boss", Role.ADMIN), issue(db, "lab", Role.ADMIN, "other")
    path, body = "/v1/machines/m0/drain", {"reason": "a <fan>"}
    with TestClient(create_app(db, tmp_path, reconcile=False), base_url=BASE, client=LOCAL) as client:
        assert client.put(path, json=body, headers=lab).status_code == 403
        assert client.put("/v1/machines/m9/drain", json=body, headers=boss).status_code == 404
        assert client.put(path, json={"reason": " "}, headers=boss).status_code == 404
        assert client.put(path, json=body, headers=boss).status_code == 204
        for page in ("/queue", "/nodes?state=out", "/nodes/one?node=m0"):
            assert "a &lt;fan&gt;" in client.get(page, headers=boss).text, page
        assert "a <fan>" in client.get("/v1/machines?project_id=other", headers=boss).text
        job = client.get("/v1/queue", headers=lab).json()["jobs"][0]
        assert "machines closed (m0: drained since 20" in job["reason"]
        for page in ("/queue", "/queue?part=1", "/v1/machines", "/v1/queue", f"/jobs/{job['job_id']}"):
            seen = client.get(page, headers=lab).text
            assert "fan" not in seen and "/nodes/readmit" not in seen and "boss" not in seen, page
            assert "drained since 20" in seen or page.startswith("/jobs"), page
        assert "m0" not in client.get("/nodes", headers=lab).text
        assert "starts jobs there again" in client.get("/nodes/readmit?node=m0", headers=boss).text
        back = client.post("/nodes/readmit", data={"node": "m0"}, headers=boss, follow_redirects=False)
        assert back.headers["location"] == "/queue" and '"closed":null' in client.get("/v1/machines", headers=boss).text
        assert client.delete(path, headers=boss).status_code == 404
        assert client.post("/nodes/drain", data={"node": "m0"}, headers=boss).status_code == 422, "without a reason"
        form = {"node": "m0", "reason": "a cable"}
        assert client.post("/nodes/drain", data=form, headers=boss, follow_redirects=False).status_code == 303
        assert client.delete(path, headers=boss).status_code == 204
    actions = [(entry.action, entry.who) for entry in audit.list_audit(db, subject="node:m0")]
    assert sorted(actions) == [("node.drain", "boss")] * 2 + [("node.readmit", "boss")] * 2


def test_an_order_is_read_once_from_another_server_and_never_from_this_one(any_db: Database) -> None:
    db = any_db
    ids = [_insert(db, number) for number in range(2)]
    now, asked = datetime.now(UTC), list[str]()
    other = Database(connect(db.engine.url.render_as_string(hide_password=False)))  # of another server

    def keep(jobs_in_order: list[str], *, at: datetime, by: Database = db) -> None:
        waits = [Wait(job=job, position=n, why="behind", text="full") for n, job in enumerate(jobs_in_order, 1)]
        order.keep(by, order.to_order("local", waits), at=at)

    def note(_conn: object, _cursor: object, statement: str, *_more: object) -> None:
        asked.append(statement)

    def read() -> list[str]:
        return [line.job_id for line in queue.read(db, now=now).jobs]

    def count_reads() -> int:
        return len([statement for statement in asked if statement.startswith("SELECT") and "waits" in statement])

    event.listen(db.engine, "before_cursor_execute", note)
    keep(ids, at=now - timedelta(seconds=4))
    assert read() == ids
    assert count_reads() == 0, "a megabyte, with 10,000 jobs, that this process has"
    keep(ids[::-1], at=now - timedelta(seconds=3), by=other)
    assert read() == read() == ids[::-1], "another server has decided since"
    assert count_reads() == 1
    keep(ids, at=now - timedelta(seconds=2))
    assert read() == ids
    keep(ids[::-1], at=now - timedelta(seconds=5), by=other)
    assert read() == ids[::-1], "the row counts, whatever the clocks of two servers say"
    with db.write() as conn:
        jobs.request_cancel(conn, ids[1], at=now)
    assert read() == [ids[0]], "what left the queue is not shown, whatever the order says"
    other.close()


def test_a_machine_is_used_by_jobs_that_have_begun(db: Database) -> None:
    """Of a job that is queued again the attempt before is released: it uses nothing."""
    for number in range(3):
        _insert(db, number, target="slurm:lab")
    with db.write() as conn:
        for number in range(2):
            attempts.insert_attempt(conn, _IDS[number], 1, handle={"nodes": [f"n{number}"]}, at=_NOW)
            jobs.advance(conn, _IDS[number], seen=Stage.QUEUED, to=Stage.PLACING, at=_NOW)
        attempts.mark_released(conn, f"{_IDS[1]}.1", at=_NOW)
        jobs.advance(conn, _IDS[1], seen=Stage.PLACING, to=Stage.RELEASING, at=_NOW)
        jobs.advance(conn, _IDS[1], seen=Stage.RELEASING, to=Stage.QUEUED, at=_NOW)
    with db.read() as conn:
        placed = nodes.list_placed(conn)
        assert placed == [holder for holder in nodes.list_holders(conn) if holder.open]
    assert [holder.nodes for holder in placed] == [("n0",)]
    assert {line.machine: [use.job for use in line.used_by] for line in machines.read(db).machines} == {"n0": ["j0"]}
