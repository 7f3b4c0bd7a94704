"""Launchers, agents, torchrun and servers are killed at seeded moments, on this machine and behind a real sshd: every
process is accounted for within 10 s, and every lock is free or named.

TRAINMASTER_OWNER_KILLS sets how many kills are drawn (`make owner-kills` draws thirty, `make test` two), half of them
over SSH.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.test_killed_ranks import CONFIG, SOURCE, torchrun
from sshd import SSHD, lab
from trainmaster.cli.training import _second_start
from trainmaster.control import reap, reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database
from trainmaster.store.rows import JobRow
from trainmaster.train.checkpoint import manifest

pytestmark = pytest.mark.spawns

KILLS = int(os.environ.get("TRAINMASTER_OWNER_KILLS", "2"))
LIMIT_S = 10.0
VICTIMS = ("command", "torchrun", "agent", "command and agent", "server")
FAR_VICTIMS = ("launcher", "torchrun", "agent", "server and agent", "server")  # the launcher is the node server there
ENDLESS = {**CONFIG, "steps": 1_000_000, "epoch_steps": 1_000_000, "eval_sequences": 0}


def draw(count: int, seed: int = 24) -> list[tuple[str, str, float]]:
    """Place, victim and moment: so many seconds after the run's first sign of life, which is before its first step."""
    dice = random.Random(seed)
    places = [("local", VICTIMS), ("ssh", FAR_VICTIMS)]
    return [
        (place, victims[number // 2 % len(victims)], round(dice.uniform(0.0, 8.0), 2))
        for number in range(count)
        for place, victims in [places[number % 2]]
    ]


def marked(mark: str) -> dict[int, str]:
    """Living processes with this word in their environment, and their commands."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
            if mark.encode() in words and (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def wait_for(what: Callable[[], object], limit_s: float = 120.0) -> object:
    end = time.monotonic() + limit_s
    while not (value := what()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def gone(mark: str) -> None:
    """Every process of the run is gone within the limit."""
    end = time.monotonic() + LIMIT_S
    while left := marked(mark):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def kill_training(folder: Path, victim: str, later_s: float) -> None:
    """`trainmaster train`, its agent, or both; the same command then goes on at once."""
    mark = f"TRAINMASTER_CHECKPOINTS={folder / 'checkpoints'}"
    (folder / "config.yaml").write_text(json.dumps(ENDLESS))
    words = [sys.executable, "-m", "trainmaster", "train", str(folder / "config.yaml"), "-n", "2", "--attempts", "1"]
    env = {**os.environ, "PYTHONPATH": SOURCE, "TRAINMASTER_CHECKPOINTS": str(folder / "checkpoints")}
    with (folder / "log").open("wb") as log:
        command = subprocess.Popen(words, env=env, stdout=log, stderr=log)
    wait_for(lambda: _second_start.find_running(folder / "checkpoints"))
    time.sleep(later_s)
    running = _second_start.find_running(folder / "checkpoints")
    assert running is not None
    if victim != "agent":
        command.kill()
    if victim != "command":
        os.kill(running.agent, signal.SIGKILL)
    command.wait()
    gone(mark)
    assert _second_start.find_running(folder / "checkpoints") is None
    saved = manifest.list_steps(folder / "checkpoints")
    more = [*words, f"steps={max(saved, default=0) + 4}"]  # more than its warm-up, also where nothing was saved
    again = subprocess.run(more, check=False, env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr


def kill_torchrun(folder: Path, later_s: float) -> None:
    process = torchrun(folder / "run", restarts=0, config=ENDLESS)
    mark = f"TRAINMASTER_EVENTS={folder / 'run' / 'events.jsonl'}"
    wait_for(lambda: len(marked(mark)) > 2)
    time.sleep(later_s)
    process.kill()
    process.wait()
    gone(mark)


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
def test_ranks_whose_torchrun_is_killed_before_they_look_for_it_end(tmp_path: Path) -> None:
    """They took the process that adopted them for their launcher: both were there ten minutes later."""
    process = torchrun(tmp_path / "run", restarts=0, config=ENDLESS)
    mark = f"TRAINMASTER_EVENTS={tmp_path / 'run' / 'events.jsonl'}"
    wait_for(lambda: len(marked(mark)) > 2)
    ranks = set(marked(mark)) - {process.pid}
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    gone(mark)


def kill_job(folder: Path, target: str, victim: str, later_s: float) -> None:
    """A job of a server, on this machine or on a host behind SSH.

    Without its server a job runs on; the next one knows every process of it, and ends them. Without its agent or its
    torchrun the ranks end by themselves, and the server says so. Without the launcher of its host it runs on.
    """
    db = open_database(folder / "trainmaster.db")
    document = {"name": "a", "target": target, "preflight": {"level": 0}, "limits": {"grace_s": 5}}
    job = submitting.submit(db, parse_spec({**document, **workload(folder, torchrun=victim == "torchrun")}))
    words = [sys.executable, "-m", "trainmaster", "serve", "--home", str(folder), "--port", "0"]
    mark = f"TRAINMASTER_ATTEMPT={job.id}.1"
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": SOURCE}, stdout=log, stderr=log)
    try:
        wait_for(lambda: len(marked(mark)) > 2)
        time.sleep(later_s)
        if "server" in victim:
            server.kill()
            server.wait()
        if victim == "launcher":
            strike(lambda command: "node_server" in command, marked(f"HOME={folder / 'lab' / 'n1' / 'home'}"))
        elif victim == "torchrun":
            strike(lambda command: "torchrun" in command or "torch.distributed.run" in command, marked(mark))
        elif "agent" in victim:
            strike(lambda command: "trainmaster.agent" in command, marked(mark))
        if victim in ("launcher", "server"):
            assert marked(mark), "the job runs on"
            submitting.cancel(db, job.id)
            if victim == "server":
                drive_to_end(db, folder, job.id)
            wait_for(lambda: (row := find_job(db, job.id)) and row.status.final)
        gone(mark)
        if victim == "server and agent":
            drive_to_end(db, folder, job.id)
        row = wait_for(lambda: (row := find_job(db, job.id)) and row.status.final and row)
        assert isinstance(row, JobRow) and row.status is not Status.COMPLETED
        assert row.status is (Status.CANCELLED if victim in ("launcher", "server") else Status.FAILED), row.message
    finally:
        server.kill()
        server.wait()
    left = asyncio.run(reap.find(db, folder, [target]))  # of other homes on this machine, too
    assert [item for item in left if item.ours] == [], "every slot is free"
    db.close()


def workload(folder: Path, *, torchrun: bool) -> dict[str, Any]:
    """Two ranks that train for ever: started by the agent, or by torchrun."""
    if not torchrun:
        return {"train": ENDLESS, "resources": {"processes_per_node": 2}}
    (folder / "config.json").write_text(json.dumps(ENDLESS))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return {"command": [*words, "-m", "trainmaster.train", str(folder / "config.json")], "env": {"PYTHONPATH": SOURCE}}


def strike(is_victim: Callable[[str], bool], processes: dict[int, str]) -> None:
    """Kill every process that is the victim; there is one."""
    victims = [pid for pid, command in processes.items() if is_victim(command)]
    assert victims, processes
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def drive_to_end(db: Database, folder: Path, job_id: str) -> None:
    """What another server does with the job."""

    async def drive() -> None:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconcile.run(db, folder, stop=stop, tick_s=0.1))
        await asyncio.to_thread(wait_for, lambda: (row := find_job(db, job_id)) and row.status.final)
        stop.set()
        await loop

    asyncio.run(drive())


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("place", "victim", "later_s"), draw(KILLS))
def test_nothing_outlives_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, victim: str, later_s: float
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    if place == "ssh":
        if SSHD is None:
            pytest.skip("no sshd on this machine")
        (tmp_path / "lab").mkdir()
        with lab(tmp_path / "lab") as made:
            made.start("n1")
            made.wait()
            target = made.write_hosts(tmp_path / "hosts.yaml", folder=str(tmp_path / "node"), lost_after_s=5.0)
            kill_job(tmp_path, target, victim, later_s)
    elif victim == "torchrun":
        kill_torchrun(tmp_path, later_s)
    elif victim == "server":
        kill_job(tmp_path, "local", victim, later_s)
    else:
        kill_training(tmp_path, victim, later_s)
