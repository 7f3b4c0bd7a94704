"""The run: a simulator with faults, jobs, and a control plane that dies at random moments of a seed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sqlalchemy import func, select

from trainmaster.control import submit as submitting
from trainmaster.core.event_catalog import CHECK_VARIABLE
from trainmaster.core.spec import parse_spec
from trainmaster.sim.lambda_cloud.faults import parse_rates
from trainmaster.sim.lambda_cloud.settings import Settings
from trainmaster.sim.lambda_cloud.simulator import Simulator
from trainmaster.store import tables
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database
from trainmaster.store.rows import JobRow

from ..drill.warm import SOURCE, Warm

EVENTS = 20
_MODULES = ("asyncssh", "httpx", "trainmaster.targets._rented_ssh", "trainmaster.targets.lambda_cloud.provider")
_MOVES = (2, 8)  # stage changes of jobs in one life of the server, at least
_LONGEST_LIFE_S = 60.0
_SWEEP_S = 120.0
TYPES = ("gpu_1x_a10", "gpu_1x_a100_sxm4", "gpu_1x_h100_pcie")
_OFFERS = 7  # regions of these types: instances at the same time are spread over them
# Each rank numbers its events: a lost or doubled row shows.
WORKLOAD = f"""
for n in $(seq 1 {EVENTS}); do
  printf '{{"v":1,"ts":"2026-01-01T00:00:00Z","phase":"STEP","event":"metrics","data":{{"step":%d}}}}\\n' $n \\
    >> "$TRAINMASTER_EVENTS"
  sleep 0.1
done
exit $CODE
"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    jobs: int
    seed: int
    faults: str = "all"
    instances: int = 12
    pace: float = 20.0
    kill_s: tuple[float, float] = (4.0, 12.0)
    limit_s: float = 1500.0
    report: Callable[[str], None] | None = None  # a line of progress


class Chaos:
    """One run in a folder of its own; `with` ends every process of it."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan, self.home = folder, plan, folder / "home"
        self.home.mkdir(parents=True)
        self.db = open_database(self.home / "trainmaster.db")
        self.jobs: list[JobRow] = []
        self.cancelled: set[str] = set()
        self.late: list[JobRow] = []  # open when the time was over
        self.stopped = False
        self.kills, self.took_s, self.ideal_minutes = 0, 0.0, 0.0
        self._random = random.Random(plan.seed)
        self._stack = contextlib.ExitStack()
        self._pid: int | None = None

    def __enter__(self) -> Self:
        key = self.folder / "ssh-key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        capacity = max(1, self.plan.instances // _OFFERS)
        settings = Settings(
            folder=self.folder / "sim", seed=self.plan.seed, time_factor=self.plan.pace, boot_s=60.0,
            capacity=capacity, quota=None, cache=self.folder / "cache",
        )  # fmt: skip
        self.simulator = self._stack.enter_context(Simulator(settings))
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LAMBDA_")},
            **self.simulator.environment(),
            "LAMBDA_SSH_KEY_FILE": str(key),
            "LAMBDA_LOST_AFTER_S": "30",
            "PYTHONPATH": str(SOURCE),
        }
        os.environ.update(self._environment)  # submit plans with them
        self._warm = Warm(*_MODULES)
        self._stack.callback(self._warm.close)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid is not None:
            self._end(signal.SIGKILL)
        self._stack.close()
        self.db.close()

    def run(self) -> None:
        """An undisturbed job for comparison; then all of them, with faults and kills; then what is left is swept."""
        self.ideal_minutes = self._measure_ideal()
        self.simulator.admin.change({"rates": parse_rates(self.plan.faults)})
        began = time.monotonic()
        self.jobs = [self._submit(number) for number in range(self.plan.jobs)]
        until = began + self.plan.limit_s
        while self.find_open() and time.monotonic() < until and not self.stopped:
            self._live(self._random.uniform(*self.plan.kill_s), until)
            self._report(began)
        self.took_s = time.monotonic() - began
        self.simulator.admin.change({"rates": dict.fromkeys(parse_rates("all"), 0.0)})
        self._sweep()

    def stop(self) -> None:
        """End the run early: the verdict is given over what was done until now."""
        self.stopped = True

    def _report(self, began: float) -> None:
        if self.plan.report is not None and self.kills % 10 == 0:
            done = len(self.jobs) - len(self.find_open())
            self.plan.report(f"{time.monotonic() - began:5.0f} s: {done} of {len(self.jobs)} jobs, {self.kills} kills")

    def find_open(self) -> list[JobRow]:
        rows = [find_job(self.db, job.id) for job in self.jobs]
        return [row for row in rows if row is not None and not row.status.final]

    def _measure_ideal(self) -> float:
        """Instance-minutes of one job without faults and kills."""
        job = self._submit(-1)
        self._start()
        while (row := find_job(self.db, job.id)) is not None and not row.status.final:
            time.sleep(0.1)
        self._end(signal.SIGTERM)
        assert row is not None and row.status.value == "completed", (row and row.reason, row and row.message)
        return float(self.simulator.summary()["instance_minutes"])

    def _submit(self, number: int) -> JobRow:
        """Every tenth job fails by itself."""
        document: dict[str, Any] = {
            "name": f"chaos-{max(number, 0)}", "target": "lambda", "command": ["sh", "-c", WORKLOAD],
            "env": {"CODE": "3" if number >= 0 and number % 10 == 9 else "0", CHECK_VARIABLE: ""},
            "preflight": {"level": 0},
            "rent": {"types": list(TYPES), "boot_minutes": 1.0, "wait_minutes": None},
            "limits": {"attempts": 8, "grace_s": 2.0},
        }  # fmt: skip
        return submitting.submit(self.db, parse_spec(document))

    def _live(self, seconds: float, until: float) -> None:
        """One life of the control plane; now and then a user cancels one of every ten jobs in it.

        It lasts at least until it has moved a few jobs: on a slow machine lives that end before would end nothing.
        """
        moves = self._count_moves() + self._random.randint(*_MOVES)
        self._start()
        doomed = [job for job in self.find_open() if job.name.endswith("5")]
        if doomed and self._random.random() < 0.1:
            chosen = self._random.choice(doomed)
            with contextlib.suppress(Exception):  # it may have ended just now
                submitting.cancel(self.db, chosen.id)
                self.cancelled.add(chosen.id)
        began = time.monotonic()
        while time.monotonic() < min(until, began + _LONGEST_LIFE_S) and self.find_open() and not self.stopped:
            if time.monotonic() - began > seconds and self._count_moves() >= moves:
                break
            time.sleep(0.2)
        self._end(signal.SIGKILL)
        self.kills += 1

    def _count_moves(self) -> int:
        with self.db.read() as conn:
            return conn.execute(select(func.count()).select_from(tables.transitions)).scalar_one()

    def _sweep(self) -> None:
        """A control plane that is left in peace, until the cloud has nothing of ours, or for two minutes.

        Jobs that are still open are stuck, or had no time: they are cancelled, so that what is left is a leak.
        """
        self.late = self.find_open()
        for job in self.late:
            submitting.cancel(self.db, job.id)
        self._start()
        end = time.monotonic() + _SWEEP_S
        while (self.simulator.summary()["not_terminated"] or self.find_open()) and time.monotonic() < end:
            time.sleep(0.5)
        self._end(signal.SIGTERM)

    def _start(self) -> None:
        words = [str(self.home), "--tick-s", "0.5"]
        self._pid = self._warm.start(words, env=self._environment, log=self.folder / "control.log")

    def _end(self, number: signal.Signals) -> None:
        assert self._pid is not None
        self._warm.end(self._pid, number)
        self._pid = None
