"""Launchers, agents, torchrun and servers are killed at seeded moments on this machine: every process is
accounted for within 10 s, and every lock is free or named.

TRAINMASTER_OWNER_KILLS sets how many kills are drawn (`make owner-kills` draws thirty, `make test` two).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.test_killed_ranks import CONFIG, SOURCE, torchrun
from trainmaster.cli.training import _second_start
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database

pytestmark = pytest.mark.spawns

KILLS = int(os.environ.get("TRAINMASTER_OWNER_KILLS", "2"))
LIMIT_S = 10.0
VICTIMS = ("command", "torchrun", "agent", "command and agent", "server")
ENDLESS = {**CONFIG, "steps": 1_000_000, "epoch_steps": 1_000_000, "eval_sequences": 0}


def draw(count: int, seed: int = 24) -> list[tuple[str, float]]:
    """Victim and moment: so many seconds after the run's first sign of life, which is before its first step."""
    dice = random.Random(seed)
    return [(VICTIMS[number % len(VICTIMS)], round(dice.uniform(0.0, 8.0), 2)) for number in range(count)]


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
    again = subprocess.run([*words, "steps=1"], check=False, env=env, capture_output=True, text=True, timeout=300)
    # A run that was already past its first step has nothing to do; the lock is free in both cases.
    assert again.returncode in (0, 2) and "in use" not in again.stdout + again.stderr, again.stdout + again.stderr


def kill_torchrun(folder: Path, later_s: float) -> None:
    process = torchrun(folder / "run", restarts=0, config=ENDLESS)
    mark = f"TRAINMASTER_EVENTS={folder / 'run' / 'events.jsonl'}"
    wait_for(lambda: len(marked(mark)) > 2)
    time.sleep(later_s)
    process.kill()
    process.wait()
    gone(mark)


def kill_server(folder: Path, later_s: float) -> None:
    """A reconciler that is gone leaves its job to run; the next one knows every process of it, and ends them."""
    db = open_database(folder / "trainmaster.db")
    spec = {"name": "a", "train": ENDLESS, "resources": {"processes_per_node": 2}, "preflight": {"level": 0}}
    job = submitting.submit(db, parse_spec(spec))
    words = [sys.executable, "-m", "trainmaster", "serve", "--home", str(folder), "--port", "0"]
    mark = f"TRAINMASTER_ATTEMPT={job.id}.1"
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": SOURCE}, stdout=log, stderr=log)
    wait_for(lambda: marked(mark))
    time.sleep(later_s)
    server.kill()
    server.wait()
    submitting.cancel(db, job.id)

    async def drive() -> None:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconcile.run(db, folder, stop=stop, tick_s=0.1))
        await asyncio.to_thread(wait_for, lambda: (row := find_job(db, job.id)) and row.status.final)
        stop.set()
        await loop

    asyncio.run(drive())
    db.close()
    gone(mark)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("victim", "later_s"), draw(KILLS))
def test_nothing_outlives_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, later_s: float
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    if victim == "torchrun":
        kill_torchrun(tmp_path, later_s)
    elif victim == "server":
        kill_server(tmp_path, later_s)
    else:
        kill_training(tmp_path, victim, later_s)
