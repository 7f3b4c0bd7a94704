"""Real jobs on a few GPUs of a stand-in nvidia-smi, while the reconciler is killed every few seconds.

    python -m control.queue_chaos --jobs 20 --seed 0        make chaos-queue

Each job locks a file for every GPU in its CUDA_VISIBLE_DEVICES: a GPU that two jobs have at once is a lock that
cannot be taken. It counts steps, saves when it is asked to stop, and goes on from there. An urgent job that needs
every GPU comes in the middle. At the end every job is completed with all its steps, each made once, and no GPU is held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainmaster.control import reconcile, submit
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.queueing.state import Rules
from trainmaster.store import attempts
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database

_GPUS = 4
_SOURCE = str(Path(__file__).parents[2] / "src")
_SMI = """#!/bin/sh
for n in 0 1 2 3; do
    case "$1" in
    -L) echo "GPU $n: NVIDIA H200 (UUID: GPU-aa-$n)";;
    --query-gpu=*) echo "GPU-aa-$n, 4";;
    esac
done
"""
_JOB = """
import fcntl, json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it polls for the stop file
shared, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def note(what):
    with open(shared / "notes", "a") as file:
        file.write(what + "\\n")
held = []
for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
    held.append(open(shared / gpu, "w"))
    try:
        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(f"double {gpu} {os.environ['TRAINMASTER_ATTEMPT']}")
saved, stop = pathlib.Path(os.environ["TRAINMASTER_CHECKPOINTS"]) / "step", pathlib.Path(os.environ["TRAINMASTER_STOP"])
saved.parent.mkdir(parents=True, exist_ok=True)
step = int(saved.read_text()) if saved.exists() else 0
while step < steps:
    time.sleep(0.05)
    step += 1
    note(f"step {os.environ['TRAINMASTER_ATTEMPT'].partition('.')[0]} {step}")
    with open(os.environ["TRAINMASTER_EVENTS"], "a") as file:
        file.write(json.dumps({"phase": "STEP", "event": "metrics", "data": {"step": step}}) + "\\n")
    if stop.exists():
        saved.write_text(str(step))
        sys.exit(75)
"""


@dataclass
class Outcome:
    """What happened."""

    faults: list[str] = field(default_factory=list)
    kills: int = 0
    preempted: int = 0
    seconds: float = 0.0


def drive(home: Path) -> None:
    """A reconciler, until it is killed."""
    db = open_database(home / "trainmaster.db")
    asyncio.run(reconcile.run(db, home, stop=asyncio.Event(), tick_s=0.1, rules=Rules(min_run_s=0.3)))


def run(home: Path, *, jobs: int, seed: int, every_s: tuple[float, float]) -> Outcome:
    rng, outcome, begin = random.Random(seed), Outcome(), time.monotonic()
    shared, programs = home / "shared", home / "bin"
    shared.mkdir()
    programs.mkdir()
    smi = programs / "nvidia-smi"
    smi.write_text(_SMI)
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    db = open_database(home / "trainmaster.db")
    steps: dict[str, int] = {}

    def add(name: str, gpus: int, priority: str, *, preemptible: bool) -> None:
        count = rng.randint(20, 80)
        spec = {
            "name": name, "command": [sys.executable, "-c", _JOB, str(shared), str(count)], "preflight": {"level": 0},
            "resources": {"processes_per_node": 1}, "queue": {"priority": priority, "preemptible": preemptible},
            "limits": {"grace_s": 10, "attempts": 1},
        }  # fmt: skip
        spec["resources"] = {"processes_per_node": gpus}
        if gpus > 1:  # one rank counts; the others hold their GPUs by it
            spec["command"] = ["sh", "-c", '[ "$RANK" = 0 ] && exec "$@"; exit 0', "sh", *spec["command"]]
        job = submit.submit(db, parse_spec(spec))
        steps[job.id] = count

    for number in range(jobs - 1):
        add(
            f"j{number}",
            rng.choice((1, 1, 1, 2, 3)),
            rng.choice(("low", "normal", "high")),
            preemptible=rng.random() < 0.6,
        )
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{_SOURCE}:{Path(__file__).parents[1]}",
    }
    urgent = False
    while not all(_is_final(db, job) for job in steps) or not urgent:
        words = [sys.executable, "-m", "control.queue_chaos", "--drive", str(home)]
        process = subprocess.Popen(words, env=environment)
        until = time.monotonic() + rng.uniform(*every_s)
        try:
            while time.monotonic() < until or not urgent:
                time.sleep(0.1)
                if not urgent and sum(_is_final(db, job) for job in steps) >= jobs // 4:
                    add("urgent", _GPUS, "urgent", preemptible=False)
                    urgent, until = True, time.monotonic() + rng.uniform(*every_s)
                if urgent and all(_is_final(db, job) for job in steps):
                    break
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        outcome.kills += 1
        if outcome.kills > 20 * jobs:
            outcome.faults.append("not over after so many kills: something is stuck")
            break
    _judge(db, shared, steps, outcome)
    outcome.seconds = time.monotonic() - begin
    db.close()
    return outcome


def _is_final(db: Database, job: str) -> bool:
    row = find_job(db, job)
    return row is not None and row.status.final


def _judge(db: Database, shared: Path, steps: dict[str, int], outcome: Outcome) -> None:
    made: dict[str, list[int]] = {job: [] for job in steps}
    for line in (shared / "notes").read_text().splitlines():
        words = line.split()
        if words[0] == "double":
            outcome.faults.append(line)
        else:
            made[words[1]].append(int(words[2]))
    for job, count in steps.items():
        row = find_job(db, job)
        assert row is not None
        if row.status is not Status.COMPLETED:
            outcome.faults.append(f"{row.name} is {row.status} in {row.stage}: {row.reason} {row.message}")
        elif made[job] != list(range(1, count + 1)):
            outcome.faults.append(f"{row.name} made the steps {made[job]} of {count}")
        tried = attempts.list_attempts(db, job)
        outcome.preempted += sum(attempt.reason is Reason.PREEMPTED for attempt in tried)
    held = [row.device for row in devices.list_devices(db) if row.attempt is not None]
    outcome.faults += [f"{device} is held at the end" for device in held]


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--jobs", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--every", type=float, nargs=2, default=(4.0, 8.0), help="seconds between two kills")
    options.add_argument("--drive", type=Path)
    chosen = options.parse_args()
    if chosen.drive is not None:
        drive(chosen.drive)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder), jobs=chosen.jobs, seed=chosen.seed, every_s=tuple(chosen.every))
    for fault in outcome.faults[:20]:
        print(fault)
    print(
        f"{chosen.jobs} jobs on {_GPUS} GPUs in {outcome.seconds:.0f} s: {outcome.kills} kills, {outcome.preempted} "
        f"preempted, {len(outcome.faults)} faults"
    )
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
