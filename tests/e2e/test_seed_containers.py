"""Seed 004, phase 3.2: a training script in a container, over SSH. One test per checkbox, on real podman."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from containers import PASSWORD, USER, Registry, registry
from sshd import lab, needs_sshd
from trainmaster import targets
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.control.log_view.logs import read
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status, TargetState
from trainmaster.storage import open_store
from trainmaster.store import attempts
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database
from trainmaster.store.rows import AttemptRow, JobRow

STEPS = pytest.mark.matrix(one_in=5, of="steps of a rented box", by_file=True)
pytestmark = [STEPS, pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]
VARIABLE = "SEED_REGISTRY_PASSWORD"
SCRIPT = "echo training in a container; until [ -e go ]; do sleep 0.05; done; echo done"


@dataclass(kw_only=True)
class Seen:
    """What was seen of one job while it ran, and how it ended."""

    job: JobRow
    attempt: AttemptRow
    images: Registry
    work: Path
    script_text: str = ""
    script_mode: int = 0
    containers: list[str] = field(default_factory=list)
    states: list[TargetState] = field(default_factory=list)
    log_while_running: bytes = b""
    parents: list[int] = field(default_factory=list)
    log: bytes = b""
    agent_log: str = ""
    crashed: JobRow | None = None  # another job, whose container is killed
    left: list[str] = field(default_factory=list)  # containers after both


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("home")
    with (
        registry(tmp_path_factory.mktemp("registry")) as images,
        lab(tmp_path_factory.mktemp("lab")) as machine,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(VARIABLE, PASSWORD)
        patch.setenv("TRAINMASTER_JOB_ENV", VARIABLE)
        box = machine.start("box", environment={"PATH": f"{images.bin}:{os.environ['PATH']}"})
        machine.wait()
        entry = {"host": "127.0.0.1", "name": "box", "port": box.port, "key": str(machine.key)}
        document = {"known_hosts": str(machine.known_hosts), "hosts": [{**entry, "python": sys.executable}]}
        (folder / "hosts.yaml").write_text(yaml.safe_dump(document))
        container = {"image": images.image, "login": {"user": USER, "password_from": VARIABLE}, "engine": "podman"}
        spec: dict[str, Any] = {
            "name": "seed", "target": f"ssh:{folder / 'hosts.yaml'}", "preflight": {"level": 0},
            "container": container, "command": ["/bin/sh", "-c", SCRIPT],
        }  # fmt: skip
        found = asyncio.run(watch(folder, images, box.home, spec))
        found.crashed = asyncio.run(
            run_to_the_end(folder, {**spec, "command": ["/bin/sh", "-c", "/bin/sh -c 'kill -9 $$'; exit $?"]})
        )
        found.left = images.containers()
        yield found


async def watch(folder: Path, images: Registry, home: Path, spec: dict[str, Any]) -> Seen:
    db = open_database(folder / "trainmaster.db")
    job = submitting.submit(db, parse_spec(spec))
    stop = asyncio.Event()
    loop = asyncio.create_task(reconcile.run(db, folder, stop=stop, tick_s=0.2))
    work, store = home / ".trainmaster" / "jobs" / job.id / "work", open_store(folder / "storage")
    seen: Seen | None = None
    try:
        while (now := find_job(db, job.id)) is not None and not now.status.final:
            await asyncio.sleep(0.05)
            script = work / "scripts" / "run_docker_job.sh"
            if now.status is not Status.RUNNING or not script.exists():
                continue
            (attempt,) = attempts.list_attempts(db, job.id)
            assert attempt.handle is not None
            log = await read(db, store, now, attempt, "rank-0.log", offset=0, limit=99)
            if seen is None and b"container" in log:
                seen = Seen(job=now, attempt=attempt, images=images, work=work, log_while_running=log)
                seen.script_text, seen.script_mode = script.read_text(), script.stat().st_mode & 0o777
                seen.containers = images.containers()
                seen.states.append((await targets.load(now.target).poll(attempt.handle)).state)
                seen.parents = parents_of(f"{job.id}.1")
                (work / "go").touch()
        assert seen is not None and now is not None, now
        (seen.attempt,) = attempts.list_attempts(db, job.id)
        seen.job = now
        seen.states.append((await targets.load(now.target).poll(seen.attempt.handle or {})).state)
        seen.log = store.get(f"jobs/{job.id}/attempts/1/rank-0.log")
        seen.agent_log = store.get(f"jobs/{job.id}/attempts/1/agent.log").decode()
    finally:
        stop.set()
        await loop
        db.close()
    return seen


async def run_to_the_end(folder: Path, spec: dict[str, Any]) -> JobRow:
    db, stop = open_database(folder / "trainmaster.db"), asyncio.Event()
    job = submitting.submit(db, parse_spec(spec))
    loop = asyncio.create_task(reconcile.run(db, folder, stop=stop, tick_s=0.2))
    try:
        while not (now := find_job(db, job.id) or job).status.final:  # noqa: ASYNC110 (rows have no event)
            await asyncio.sleep(0.05)
        return now
    finally:
        stop.set()
        await loop
        db.close()


def parents_of(mark: str) -> list[int]:
    """Parents of the agents of an attempt; the guard of an agent is its own child."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            if b"trainmaster.agent" in command and f"TRAINMASTER_ATTEMPT={mark}".encode() in environment:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return [parent for parent in found.values() if parent not in found]


def test_can_upload_run_docker_job_sh(seen: Seen) -> None:
    assert seen.script_text.startswith("#!/bin/sh\n") and seen.images.image in seen.script_text


def test_script_has_correct_permissions(seen: Seen) -> None:
    assert seen.script_mode == 0o755


def test_can_execute_script_on_gpu(seen: Seen) -> None:
    assert seen.log.startswith(b"training in a container\n")


def test_docker_login_works(seen: Seen) -> None:
    assert "podman login: Login Succeeded!" in seen.agent_log
    assert PASSWORD not in seen.agent_log + seen.script_text


def test_docker_pull_works(seen: Seen) -> None:
    assert f"pulling {seen.images.image} with podman" in seen.agent_log


def test_docker_container_starts(seen: Seen) -> None:
    assert seen.containers == [f"trainmaster-{seen.job.id}-1-0"]


def test_can_run_in_background(seen: Seen) -> None:
    """The agent belongs to no connection: its parent is init, or whatever adopts orphans there."""
    assert len(seen.parents) == 1
    command = Path(f"/proc/{seen.parents[0]}/cmdline").read_bytes()
    assert b"node_server" not in command and b"sshd" not in command


def test_can_check_if_process_is_running(seen: Seen) -> None:
    assert seen.states == [TargetState.RUNNING, TargetState.SUCCEEDED]


def test_can_view_training_logs(seen: Seen) -> None:
    assert seen.log_while_running == b"training in a container\n"


def test_container_completes_successfully(seen: Seen) -> None:
    assert seen.job.status is Status.COMPLETED and seen.log.endswith(b"done\n")
    assert seen.attempt.exit is not None and seen.attempt.exit.exit_codes == {"0": 0}
    assert seen.images.containers() == []


def test_docker_container_crashes(seen: Seen) -> None:
    job = seen.crashed
    assert job is not None and job.status is Status.FAILED and job.reason is not None, job
    assert "137" in job.message or "SIGKILL" in job.message, job.message
    assert seen.left == [], "the container is removed"
    assert parents_of(f"{job.id}.1") == [], "no process is left"
