"""`reap` finds what no live job owns, by the target alone or with the database, and ends only what is ours."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import trainmaster
from trainmaster.cli.main import build
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage, Status
from trainmaster.store import attempts, jobs
from trainmaster.store.migrate import open_database
from trainmaster.targets import Handle, Placement
from trainmaster.targets.local import Local

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def run(*words: str) -> Result:
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner(env=env).invoke(build(), ["reap", *words])


@pytest.fixture
def job_id() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def running(tmp_path: Path, job_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    """A real attempt on this machine that would sleep for ever."""
    monkeypatch.setenv("PYTHONPATH", str(Path(trainmaster.__file__).parents[1]))
    spec = parse_spec({"name": "a", "preflight": {"level": 0}, "command": ["sleep", "600"]})
    home = tmp_path / "home"
    placement = Placement(attempt=f"{job_id}.1", spec=spec, job_folder=home / "jobs" / job_id)
    target = Local()
    handle = asyncio.run(target.submit(target.plan(placement)))
    yield handle
    asyncio.run(target.release(handle))


def is_running(handle: Handle) -> bool:
    return asyncio.run(Local().poll(handle)).state == "running"


def mine(done: Result, job_id: str) -> list[dict[str, object]]:
    return [item for item in json.loads(done.stdout)["leftovers"] if item["attempt"] == f"{job_id}.1"]


@pytest.mark.spawns
def test_a_live_job_is_left_alone_and_a_finished_one_is_reaped(running: Handle, job_id: str, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    db = open_database(tmp_path / "home" / "trainmaster.db")
    with db.write() as conn:
        jobs.insert_job(conn, job_id, parse_spec({"name": "a", "command": ["sleep", "600"]}), at=AT)
        attempts.insert_attempt(conn, job_id, 1, handle=dict(running), at=AT)
        jobs.advance(conn, job_id, seen=Stage.QUEUED, to=Stage.RUNNING, at=AT)
    assert mine(run("--json", "--yes", "--home", home), job_id) == [] and is_running(running)
    with db.write() as conn:
        jobs.advance(conn, job_id, seen=Stage.RUNNING, to=Stage.RELEASING, at=AT)
        jobs.finish(conn, job_id, seen=Stage.RELEASING, status=Status.CANCELLED, reason=None, message="", at=AT)
    listed = run("--json", "--home", home)
    assert listed.exit_code == 1 and is_running(running), "without --yes it only lists"
    (item,) = mine(listed, job_id)
    assert item["why"] == "its job is cancelled" and "process" in str(item["what"])
    ended = run("--json", "--yes", "--home", home)
    assert ended.exit_code == 0 and mine(ended, job_id)[0]["result"] == "ended", ended.output
    assert not is_running(running)
    assert attempts.list_attempts(db, job_id)[0].released_at is not None
    assert mine(run("--json", "--home", home), job_id) == []
    db.close()


@pytest.mark.spawns
def test_another_home_is_shown_and_never_touched(running: Handle, job_id: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (item,) = mine(run("--json", "--yes", "--home", str(other)), job_id)
    assert item["ours"] is False and item["result"] is None
    assert mine(run("--json", "--yes", "--no-database", "--home", str(other)), job_id)[0]["result"] is None
    assert is_running(running)


@pytest.mark.spawns
def test_the_target_alone_is_enough(running: Handle, job_id: str, tmp_path: Path) -> None:
    ended = run("--json", "--yes", "--no-database", "--home", str(tmp_path / "home"))
    assert mine(ended, job_id)[0]["result"] == "ended", ended.output
    assert not is_running(running)
    assert not (tmp_path / "home" / "trainmaster.db").exists(), "no database was needed, and none was made"
    assert Path(str(running["folder"])).is_dir(), "folders stay"
