"""Real jobs on a few GPUs of a stand-in nvidia-smi, while one reconciler, or one of two, is killed every few seconds.

    python -m control.queue_chaos --jobs 50 --seed 0 [--servers 1]        make chaos-queue

One server works on SQLite, two share PostgreSQL. Each job locks a file for every GPU in its CUDA_VISIBLE_DEVICES: a GPU
that two jobs have at once is a lock that cannot be taken. It counts steps, saves when it is asked to stop, and goes on
from there. One project has a quota, and urgent jobs that need every GPU come in the middle, one in 12. Every pass of
every server is judged by the brute-force model of the rules. At the end every job is completed with all its steps, each
made once, each start was decided by a pass, the quota was kept, and no GPU is held.
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
from datetime import datetime
from pathlib import Path

from postgres import Postgres, binaries
from queueing.model import judge
from trainmaster.control import reconcile, submit
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.queueing.schedule import schedule
from trainmaster.queueing.state import Decisions, Rules, State
from trainmaster.store import attempts
from trainmaster.store.capacity import devices, order
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database

_GPUS = 4
_QUOTA = 2  # of the project `small`
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
    passes: int = 0
    seconds: float = 0.0


def drive(home: Path, where: str) -> None:
    """A reconciler, until it is killed. What it decides is judged, and noted before anybody acts on it."""
    noted = (home / "shared" / "decided").open("a", buffering=1)

    def decide(state: State) -> Decisions:
        decided = schedule(state)
        lines = ["pass", *(f"broken {fault}" for fault in judge(state, decided))]
        for start in decided.starts:
            lines.append(" ".join(["start", start.job, *(gpu for some in start.devices.values() for gpu in some)]))
        noted.write("".join(f"{line}\n" for line in lines))
        return decided

    order.schedule = decide  # type: ignore[attr-defined]
    db = open_database(where)
    asyncio.run(reconcile.run(db, home, stop=asyncio.Event(), tick_s=0.1, rules=Rules(min_run_s=0.3)))


def run(
    home: Path, *, jobs: int, seed: int, every_s: tuple[float, float], servers: int = 1, where: str | None = None
) -> Outcome:
    """`where` is the database; not stated: a file of the home."""
    rng, outcome, begin = random.Random(seed), Outcome(), time.monotonic()
    where = where or str(home / "trainmaster.db")
    environment = _furnish(home)
    db, shared = open_database(where), home / "shared"
    with db.write() as conn:
        devices.set_share(conn, "small", quota=_QUOTA)
    steps: dict[str, int] = {}

    def add(name: str, gpus: int, priority: str, *, preemptible: bool, project: str = "default") -> None:
        count = rng.randint(20, 80)
        command = [sys.executable, "-c", _JOB, str(shared), str(count)]
        if gpus > 1:  # one rank counts; the others hold their GPUs by it
            command = ["sh", "-c", '[ "$RANK" = 0 ] && exec "$@"; exit 0', "sh", *command]
        spec = {
            "name": name, "project": project, "command": command, "preflight": {"level": 0},
            "resources": {"processes_per_node": gpus}, "queue": {"priority": priority, "preemptible": preemptible},
            "limits": {"grace_s": 10, "attempts": 1},
        }  # fmt: skip
        steps[submit.submit(db, parse_spec(spec)).id] = count

    urgent = max(1, jobs // 12)
    for number in range(jobs - urgent):
        gpus, priority = rng.choice((1, 1, 1, 2, 3)), rng.choice(("low", "normal", "high"))
        project = "small" if gpus <= _QUOTA and rng.random() < 0.3 else "default"
        add(f"j{number}", gpus, priority, preemptible=rng.random() < 0.9, project=project)

    def start() -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "control.queue_chaos", "--drive", str(home), "--where", where]
        return subprocess.Popen(words, env=environment)

    living = [start() for _ in range(servers)]
    came, until = 0, time.monotonic() + rng.uniform(*every_s)
    try:
        while came < urgent or not all(_is_final(db, job) for job in steps):
            time.sleep(0.1)
            if came < urgent and sum(_is_final(db, job) for job in steps) >= (came + 1) * jobs // (urgent + 3):
                add(f"urgent{came}", _GPUS, "urgent", preemptible=False)
                came += 1
            if time.monotonic() < until:
                continue
            struck = rng.randrange(servers)
            living[struck].send_signal(signal.SIGKILL)
            living[struck].wait()
            outcome.kills += 1
            if outcome.kills > 20 * jobs:
                outcome.faults.append("not over after so many kills: something is stuck")
                break
            living[struck] = start()
            until = time.monotonic() + rng.uniform(*every_s)
    finally:
        for process in living:
            process.kill()
            process.wait()
    _judge(db, shared, steps, outcome)
    outcome.seconds = time.monotonic() - begin
    db.close()
    return outcome


def _furnish(home: Path) -> dict[str, str]:
    """The stand-in of nvidia-smi; the environment in which it is found."""
    programs = home / "bin"
    for folder in (programs, home / "shared"):
        folder.mkdir()
    smi = programs / "nvidia-smi"
    smi.write_text(_SMI)
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    sources = f"{_SOURCE}:{Path(__file__).parents[1]}"
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": sources}


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
    decided: set[tuple[str, ...]] = set()
    for line in (shared / "decided").read_text().splitlines():
        word, _, rest = line.partition(" ")
        outcome.passes += word == "pass"
        outcome.faults += [f"a pass broke a rule: {rest}"] if word == "broken" else []
        decided |= {tuple(rest.split())} if word == "start" else set()
    held: list[tuple[datetime, datetime, str, str]] = []  # from, to, project, GPU
    for job, count in steps.items():
        row = find_job(db, job)
        assert row is not None
        if row.status is not Status.COMPLETED:
            outcome.faults.append(f"{row.name} is {row.status} in {row.stage}: {row.reason} {row.message}")
        elif made[job] != list(range(1, count + 1)):
            outcome.faults.append(f"{row.name} made the steps {made[job]} of {count}")
        for attempt in attempts.list_attempts(db, job):
            outcome.preempted += attempt.reason is Reason.PREEMPTED
            gpus = [gpu for some in (attempt.handle or {}).get("devices", {}).values() for gpu in some]
            if (job, *gpus) not in decided:
                outcome.faults.append(f"{row.name} started on {gpus}, which no pass decided")
            if attempt.released_at is not None:
                held += [(attempt.created_at, attempt.released_at, row.project, gpu) for gpu in gpus]
    outcome.faults += _find_overlaps(held)
    left = [row.device for row in devices.list_devices(db) if row.attempt is not None]
    outcome.faults += [f"{device} is held at the end" for device in left]


def _find_overlaps(held: list[tuple[datetime, datetime, str, str]]) -> list[str]:
    """GPUs that the rows give to two attempts at a time, and moments at which a project is over its quota."""
    faults = []
    for since, until, _, gpu in held:
        now = [other for other in held if other[0] <= since < other[1]]
        if sum(other[3] == gpu for other in now) > 1:
            faults.append(f"{gpu} was booked twice between {since} and {until}")
        if (count := sum(other[2] == "small" for other in now)) > _QUOTA:
            faults.append(f"project small had {count} GPUs at {since}")
    return faults


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=50)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--every", type=float, nargs=2, default=(4.0, 8.0), help="seconds between two kills")
    options.add_argument("--servers", type=int, choices=(1, 2), help="not stated: one, then two")
    options.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--where", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.drive is not None:
        drive(chosen.drive, chosen.where)
        return 0
    broken, programs = 0, binaries()
    for servers in [chosen.servers] if chosen.servers else [1, 2]:
        if servers == 2 and programs is None:
            print("two servers: not run, PostgreSQL is not installed")
            broken += 1
            continue
        server = Postgres(programs) if servers == 2 and programs is not None else None
        where = server.create() if server is not None else None
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(
                Path(folder), jobs=chosen.jobs, seed=chosen.seed, every_s=tuple(chosen.every), servers=servers,
                where=where,
            )  # fmt: skip
        if server is not None:
            server.close()
        broken += len(outcome.faults)
        print("".join(f"{fault}\n" for fault in outcome.faults[:20]), end="")
        print(
            f"servers: {servers}; {chosen.jobs} jobs, {_GPUS} GPUs, {outcome.seconds:.0f} s: {outcome.kills} kills, "
            f"{outcome.passes} passes, {outcome.preempted} preempted, {len(outcome.faults)} faults",
            flush=True,
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
