"""One GPU, several jobs: who waits and why, preemption and resume beside an undisturbed run, a foreign program.

    PYTHONPATH=$PWD/src python3 benchmarks/queue_gpu.py queue       a job alone; the same one preempted
    PYTHONPATH=$PWD/src python3 benchmarks/queue_gpu.py goodput     10 minutes with 5 SIGKILLs of the rank
    … --device cpu --steps 60     tries the script itself, with a stand-in of nvidia-smi first in PATH

Jobs are submitted to `local` and driven as `trainmaster serve` drives them, but a job may be preempted after
`--min-run` seconds. Prints what the queue says at each stage, and at the end a line for each thing that was to be seen.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainmaster.agent.processes import living
from trainmaster.control import reconcile, submit
from trainmaster.core.plan import PLAN_FILE, Plan
from trainmaster.core.spec import parse_spec
from trainmaster.queueing.state import Rules
from trainmaster.store import attempts
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database

LIMIT_S = 240.0
READY = "ready"  # a file of the home: its jobs are driven
FOREIGN = (
    "import sys, time, torch; held = torch.zeros(4 << 30, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize(); "
    "print('holds', flush=True); time.sleep(600)"
)


class Lab:
    """A home with its database, and the process that drives its jobs."""

    def __init__(self, home: Path, options: argparse.Namespace) -> None:
        self.home, self.options = home, options
        self.db: Database = open_database(str(home / "trainmaster.db"))
        words = [sys.executable, __file__, "drive", "--home", str(home), "--min-run", str(options.min_run)]
        # The server that a job is submitted to has been up for a while: its imports are no part of the job's queue.
        self.driver = subprocess.Popen(words)
        while not (home / READY).exists() and self.driver.poll() is None:
            time.sleep(0.05)

    def submit(self, name: str, *, priority: str = "normal", preemptible: bool = False, **train: Any) -> str:
        spec = {
            "name": name, "preflight": {"level": 0}, "limits": {"grace_s": 60},
            "queue": {"priority": priority, "preemptible": preemptible},
            "train": {**_config(self.options), **train},
        }  # fmt: skip
        job: str = submit.submit(self.db, parse_spec(spec)).id
        return job

    def stage(self, job: str) -> str:
        row = find_job(self.db, job)
        assert row is not None
        return str(row.status.value)

    def wait(self, job: str, *stages: str) -> float:
        began = time.monotonic()
        while self.stage(job) not in stages:
            if time.monotonic() - began > LIMIT_S:
                raise SystemExit(
                    f"{job} is {self.stage(job)} after {LIMIT_S:g} s, not {' or '.join(stages)}\n{self.queue()}"
                )
            time.sleep(0.1)
        return time.monotonic() - began

    def queue(self) -> str:
        return self.command("queue")

    def command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "trainmaster", *words, "--home", str(self.home)],
            capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "160"},
        )  # fmt: skip
        return done.stdout + done.stderr

    def events(self, job: str) -> list[dict[str, Any]]:
        found = []
        for path in sorted(
            self.home.glob(f"jobs/{job}/attempts/*/events.jsonl"), key=lambda path: path.stat().st_mtime
        ):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def losses(self, job: str) -> dict[int, set[float]]:
        """Step → its losses; more than one is a run that is not the same after a resume."""
        told: dict[int, set[float]] = {}
        for event in self.events(job):
            if (event["phase"], event["event"]) == ("STEP", "metrics"):
                told.setdefault(event["data"]["step"], set()).add(event["data"]["loss"])
        return told

    def rank_pid(self, job: str) -> int:
        """The process whose output is the log of rank 0."""
        for path in self.home.glob(f"jobs/{job}/attempts/*/{PLAN_FILE}"):
            for pid in living(Plan.from_json(path.read_text()).mark):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/fd/1").readlink().name == "rank-0.log":
                        return pid
        raise SystemExit("rank 0 was not found")

    def close(self) -> None:
        self.driver.send_signal(signal.SIGKILL)
        self.driver.wait()
        self.db.close()


def run_queue(lab: Lab) -> int:
    seen: dict[str, Any] = {}
    alone = lab.submit("alone")
    lab.wait(alone, "completed", "failed")
    with _foreign(lab.options.device) as holds:
        one = lab.submit("one", priority="low", preemptible=True)
        time.sleep(8 if holds else 0)
        seen["a foreign program is waited for"] = not holds or lab.stage(one) not in ("running", "completed", "failed")
        print("beside a foreign program:\n" + lab.queue() + lab.command("nodes"), flush=True)
    print(f"starts {lab.wait(one, 'running', 'completed'):.1f} s after that program ended", flush=True)
    two = lab.submit("two", priority="low", steps=20)
    time.sleep(lab.options.min_run + 3)
    seen["the second job waits for the first"] = (lab.stage(one), lab.stage(two)) == ("running", "pending")
    print("two jobs, one GPU:\n" + lab.queue() + lab.command("nodes"), flush=True)
    urgent = lab.submit("urgent", priority="urgent", steps=20)
    began = time.monotonic()
    lab.wait(urgent, "running", "completed")
    print(f"urgent runs {time.monotonic() - began:.1f} s after it came:\n{lab.queue()}", flush=True)
    for job in (urgent, one, two):
        lab.wait(job, "completed", "failed", "cancelled")
    states = {name: lab.stage(job) for name, job in (("alone", alone), ("one", one), ("two", two), ("urgent", urgent))}
    seen["all end completed"] = set(states.values()) == {"completed"} or states
    reasons = [str(attempt.reason) for attempt in attempts.list_attempts(lab.db, one)]
    seen["the first was preempted and resumed"] = "preempted" in reasons or reasons
    mine, reference = lab.losses(one), lab.losses(alone)
    seen["every loss is bit-equal to the undisturbed run"] = (mine == reference and len(mine) > 1) or (
        f"{sum(mine.get(step) != loss for step, loss in reference.items())} of {len(reference)} differ"
    )
    print(f"{len(mine)} losses compared; {lab.command('goodput', one)}")
    for what, value in seen.items():
        print(f"{'pass' if value is True else 'FAIL'}  {what}{'' if value is True else f': {value}'}")
    return 0 if all(value is True for value in seen.values()) else 1


def run_goodput(lab: Lab) -> int:
    options = lab.options
    job = lab.submit("long", steps=10_000_000)
    began = time.monotonic()
    lab.wait(job, "running", "failed")
    length = options.minutes * 60
    for number in range(options.kills):
        while time.monotonic() - began < length * (number + 1) / (options.kills + 1):
            time.sleep(0.1)
        os.kill(lab.rank_pid(job), signal.SIGKILL)
        print(f"kill {number + 1} after {time.monotonic() - began:.0f} s", flush=True)
    while time.monotonic() - began < length:
        time.sleep(0.1)
    print(lab.command("cancel", job), flush=True)
    lab.wait(job, "cancelled", "failed", "completed")
    for event in lab.events(job):
        if event["phase"] == "RECOVERY":
            print(
                event["event"],
                {key: event["data"].get(key) for key in ("seconds", "resumed_from", "step", "tier", "parts")},
            )
    told = lab.losses(job)
    twice = sum(len(losses) > 1 for losses in told.values())
    print(f"{len(told)} steps, {twice} with two losses; highest {max(told, default=0)}")
    print(lab.command("goodput", job), lab.command("goodput", job, "--json"), sep="\n")
    return 0


@contextlib.contextmanager
def _foreign(device: str) -> Iterator[bool]:
    """A program of somebody else on the GPU."""
    if device == "cpu":
        yield False
        return
    with subprocess.Popen([sys.executable, "-c", FOREIGN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield True
        finally:
            process.kill()


def _config(options: argparse.Namespace) -> dict[str, Any]:
    model: dict[str, Any] = {"layers": 8, "width": 1024, "heads": 16, "kv_heads": 8, "ffn_width": 4096}
    tokens, batch = 256, 64
    if options.device == "cpu":
        model, tokens, batch = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn_width": 128}, 64, 8
    elif options.what == "goodput":
        model, tokens, batch = {"preset": options.preset}, 8192, 2
    memory = {"use": options.memory, "every_steps": options.memory_every}
    return {
        "model": model, "steps": options.steps, "epoch_steps": 1_000_000, "batch_sequences": batch,
        "sequence_tokens": tokens, "eval_sequences": 0, "device": options.device,
        "master": "fp32" if options.device == "cpu" else "bf16", "optimizer": {"lr": 1e-5},
        "deterministic": options.what == "queue",
        "checkpoint": {"every_steps": options.every, "memory": memory},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("queue", "goodput", "drive"))
    parser.add_argument("--home", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=100, help="steps between saves to the disk")
    parser.add_argument("--memory", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--memory-every", type=int, default=10)
    parser.add_argument("--min-run", type=float, default=10.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--preset", default="llama3.2-1b")
    options = parser.parse_args()
    if options.what == "drive":
        db = open_database(str(options.home / "trainmaster.db"))
        (options.home / READY).touch()
        asyncio.run(reconcile.run(db, options.home, stop=asyncio.Event(), rules=Rules(min_run_s=options.min_run)))
        return 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        lab = Lab(options.home or Path(folder), options)
        try:
            return run_queue(lab) if options.what == "queue" else run_goodput(lab)
        finally:
            lab.close()


if __name__ == "__main__":
    sys.exit(main())
