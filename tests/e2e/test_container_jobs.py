"""Containers as jobs, with real podman and a real registry, on this machine and behind real OpenSSH servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers import PASSWORD, USER, Registry, registry
from reconciling import drive
from sshd import Lab, lab, needs_sshd
from trainmaster.control import submit as submitting
from trainmaster.control.log_view.logs import read
from trainmaster.core.plan import ATTEMPT_VARIABLE
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.storage import open_store
from trainmaster.store import attempts, events
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]
VARIABLE = "TEAM_REGISTRY_PASSWORD"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("registry")) as made:
        yield made


@pytest.fixture(scope="module")
def machine(images: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("lab")) as made:
        made.start("box", environment={"PATH": f"{images.bin}:{os.environ['PATH']}"})
        made.wait()
        yield made


@pytest.fixture(params=["local", "ssh"])
def target(request: pytest.FixtureRequest, images: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(VARIABLE, PASSWORD)
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", VARIABLE)
    monkeypatch.setenv("PATH", f"{images.bin}:{os.environ['PATH']}")
    if request.param == "local":
        return "local"
    machine: Lab = request.getfixturevalue("machine")
    return machine.write_hosts(tmp_path / "hosts.yaml")


def spec_of(images: Registry, target: str, script: str | None, **more: Any) -> dict[str, Any]:
    container = {
        "image": images.image, "engine": "podman", "login": {"user": USER, "password_from": VARIABLE},
        **more.pop("container", {}),
    }  # fmt: skip
    command = {} if script is None else {"command": ["/bin/sh", "-c", script]}
    return {"name": "box", "target": target, "preflight": {"level": 0}, "container": container, **command, **more}


def kept(home: Path, job: JobRow, path: str) -> bytes:
    return open_store(home / "storage").get(f"jobs/{job.id}/{path}")


def everything_written(home: Path) -> bytes:
    """Every byte below a folder, names included."""
    return b"".join(
        str(path).encode() + (path.read_bytes() if path.is_file() and not path.is_symlink() else b"")
        for path in home.rglob("*")
    )


def processes_of(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{ATTEMPT_VARIABLE}={mark}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


EVENT = '{"phase":"TRAINING","event":"epoch_complete","iteration":1,"epoch":1,"data":{"avg_loss":0.5}}'


def test_a_container_runs_to_its_end_and_leaves_its_files(
    db: Database, tmp_path: Path, target: str, images: Registry
) -> None:
    script = (
        f"echo in the container; ls -d data configs scripts; echo '{EVENT}' >> global.json; "
        "cat scripts/run_docker_job.sh > $TRAINMASTER_OUTPUTS/script; echo $RANK/$WORLD_SIZE $COLOUR; "
        "env > $TRAINMASTER_OUTPUTS/env"
    )
    job = submitting.submit(db, parse_spec(spec_of(images, target, script, env={"COLOUR": "blue"})))
    ended = drive(db, tmp_path, job)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    log = kept(tmp_path, job, "attempts/1/rank-0.log").decode()
    assert log == "in the container\nconfigs\ndata\nscripts\n0/1 blue\n"
    assert events.find_event(db, f"{job.id}.1", phase="TRAINING", event="epoch_complete") is not None
    text = kept(tmp_path, job, "outputs/script").decode()
    assert text.startswith("#!/bin/sh\n") and " run " in text and "blue" not in text
    assert images.containers() == []
    for secret in (PASSWORD.encode(), b"auth.json"):
        assert secret not in everything_written(tmp_path / "jobs") + everything_written(tmp_path / "storage")
    assert PASSWORD not in kept(tmp_path, job, "outputs/env").decode()


@pytest.mark.matrix(one_in=4, of="containers that end otherwise")
@pytest.mark.parametrize("target", ["ssh"], indirect=True)
def test_a_container_that_crashes_is_typed_with_its_exit_code(
    db: Database, tmp_path: Path, target: str, images: Registry
) -> None:
    job = submitting.submit(db, parse_spec(spec_of(images, target, "echo about to break; exit 7")))
    ended = drive(db, tmp_path, job)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.SCRIPT_FAILED)
    assert "exited with 7: about to break" in ended.message
    (attempt,) = attempts.list_attempts(db, job.id)
    assert attempt.exit is not None and attempt.exit.exit_codes == {"0": 7}
    assert images.containers() == []


@pytest.mark.matrix(one_in=4, of="containers that end otherwise")
@pytest.mark.parametrize("target", ["local"], indirect=True)
def test_a_container_that_is_killed_is_a_crash(db: Database, tmp_path: Path, target: str, images: Registry) -> None:
    job = submitting.submit(db, parse_spec(spec_of(images, target, "sleep 600")))
    killed: list[str] = []

    def kill(now: JobRow) -> None:
        if not killed and now.status is Status.RUNNING and (names := images.containers()):
            with contextlib.suppress(AssertionError):  # it may not have started yet
                killed.append(images.podman("kill", "--signal", "KILL", *names))

    ended = drive(db, tmp_path, job, kill)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.CRASHED), ended.message
    assert "exited with 137 (SIGKILL)" in ended.message
    assert images.containers() == []


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("target", ["ssh"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "{address}/team/none:1"}, r"podman pull .*(manifest unknown|not found)"),
        ({"login": {"user": USER, "password_from": "WRONG_PASSWORD"}}, "invalid username/password"),
        ({"login": None}, r"unauthorized|authentication required"),
    ],
    ids=["no such image", "wrong password", "no login"],
)
def test_an_image_that_cannot_be_had_is_typed(
    db: Database, tmp_path: Path, target: str, images: Registry, change: dict[str, Any], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("WRONG_PASSWORD", "wrong")
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", f"{VARIABLE},WRONG_PASSWORD")
    if "image" in change:
        change = {"image": change["image"].format(address=images.address)}
    job = submitting.submit(db, parse_spec(spec_of(images, target, "true", container=change)))
    ended = drive(db, tmp_path, job)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.IMAGE_ERROR), ended.message
    assert re.search(message, ended.message), ended.message
    assert images.containers() == []


@pytest.mark.matrix(one_in=4, of="containers that end otherwise")
@pytest.mark.parametrize("target", ["ssh"], indirect=True)
def test_a_cancelled_container_gets_its_signal_and_is_removed(
    db: Database, tmp_path: Path, target: str, images: Registry
) -> None:
    script = "trap 'echo saving > $TRAINMASTER_OUTPUTS/saved; exit 75' TERM; echo up; while true; do sleep 0.1; done"
    job = submitting.submit(db, parse_spec(spec_of(images, target, script)))
    asked: list[bool] = []

    def cancel(now: JobRow) -> None:
        if not asked and now.status is Status.RUNNING and processes_of(f"{job.id}.1") and images.containers():
            submitting.cancel(db, job.id)
            asked.append(True)

    ended = drive(db, tmp_path, job, cancel)
    assert ended.status is Status.CANCELLED
    assert kept(tmp_path, job, "outputs/saved") == b"saving\n"
    assert images.containers() == [] and processes_of(f"{job.id}.1") == []


@pytest.mark.matrix(one_in=4, of="containers that end otherwise")
@pytest.mark.parametrize("target", ["ssh"], indirect=True)
def test_a_container_whose_agent_was_killed_is_removed(
    db: Database, tmp_path: Path, target: str, images: Registry
) -> None:
    job = submitting.submit(db, parse_spec(spec_of(images, target, "echo up; sleep 600")))
    killed: list[int] = []

    def kill(now: JobRow) -> None:
        if not killed and now.status is Status.RUNNING and images.containers():
            for pid in processes_of(f"{job.id}.1"):
                with contextlib.suppress(OSError):
                    if b"trainmaster.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        killed.append(pid)
                        os.kill(pid, signal.SIGKILL)

    ended = drive(db, tmp_path, job, kill)
    assert killed and (ended.status, ended.reason) == (Status.FAILED, Reason.NODE_LOST), ended.message
    assert images.containers() == [] and processes_of(f"{job.id}.1") == []


def test_a_password_that_jobs_may_not_have_is_refused(
    db: Database, tmp_path: Path, images: Registry, machine: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, PASSWORD)
    monkeypatch.delenv("TRAINMASTER_JOB_ENV", raising=False)
    job = submitting.submit(db, parse_spec(spec_of(images, machine.write_hosts(tmp_path / "hosts.yaml"), "true")))
    ended = drive(db, tmp_path, job)
    assert ended.status is Status.FAILED and f"set {VARIABLE} in the environment" in ended.message


def test_the_script_is_executable_and_can_be_read_while_it_runs(
    db: Database, tmp_path: Path, images: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{images.bin}:{os.environ['PATH']}")
    monkeypatch.setenv(VARIABLE, PASSWORD)
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", VARIABLE)
    job = submitting.submit(db, parse_spec(spec_of(images, "local", "echo up; sleep 1")))
    logs: list[bytes] = []

    async def look(now: JobRow) -> None:
        (attempt,) = attempts.list_attempts(db, job.id)
        store = open_store(tmp_path / "storage")
        if text := await read(db, store, now, attempt, "rank-0.log", offset=0, limit=99):  # it may not have begun
            logs.append(text)

    def see(now: JobRow) -> None:
        script = tmp_path / "jobs" / job.id / "work" / "scripts" / "run_docker_job.sh"
        if not logs and now.status is Status.RUNNING and script.exists() and images.containers():
            assert stat.S_IMODE(script.stat().st_mode) == 0o755
            asyncio.get_running_loop().create_task(look(now))

    assert drive(db, tmp_path, job, see).status is Status.COMPLETED
    assert b"up\n" in logs
