"""Jobs that come and go on SSH hosts for a while, and one job that is watched all the time.

    PYTHONPATH=tests python benchmarks/ssh_soak.py --minutes 20       make soak-ssh
    PYTHONPATH=tests python benchmarks/ssh_soak.py --minutes 0.4      as in the tests

Short jobs complete, fail or are cancelled, one after another on each host; now and then the connections of a host are
cut. The watched job writes 1,440 events, five seconds apart by their own times: two hours of simulated time in the
time of the run. Afterwards every job has ended as it should, each event has one row, all hosts are connected and hold
nothing, and the memory of the control plane has not grown. The verdict is printed as JSON in the last line; exit code
1 where something of it is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sshd import Lab, bench
from trainmaster import targets
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.store import events
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database
from trainmaster.store.rows import JobRow
from trainmaster.targets import Lists

WATCHED, APART_S = 1440, 5  # events of the watched job, and simulated seconds between two of them
GROWTH_MIB = 8.0  # of resident memory between the second and the last third; caches fill in the first
LINE = '{"v":1,"ts":"%s","phase":"STEP","event":"metrics","data":{"step":%d}}'
SHORT = f"""
for n in 1 2 3 4 5; do printf '{LINE}\\n' 2026-01-01T00:00:00Z $n >> "$TRAINMASTER_EVENTS"; sleep 0.1; done
[ $KIND = cancel ] && exec sleep 600
echo $n > "$TRAINMASTER_OUTPUTS/n"; [ $KIND = complete ]
"""
ENDS = {"complete": Status.COMPLETED, "fail": Status.FAILED, "cancel": Status.CANCELLED}


@dataclass(kw_only=True)
class Verdict:
    """Figures of a run, and what is wrong with them."""

    seconds: float = 0.0
    jobs: dict[str, int] = field(default_factory=dict)
    cuts: int = 0
    watched_events: int = 0
    watched_hours: float = 0.0
    memory_mib: list[float] = field(default_factory=list)  # median of each third of the run
    files: list[int] = field(default_factory=list)  # open descriptors, likewise
    connections: int = 0  # at the end
    wrong: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Soak:
    db: Database
    home: Path
    target: str
    machines: Lab
    seconds: float
    random: random.Random
    verdict: Verdict = field(default_factory=Verdict)
    samples: list[tuple[float, int]] = field(default_factory=list)  # memory and descriptors

    def submit(self, kind: str) -> JobRow:
        spec = {"name": kind, "target": self.target, "command": ["sh", "-c", SHORT], "env": {"KIND": kind}}
        return submitting.submit(self.db, parse_spec({**spec, "preflight": {"level": 0}, "limits": {"grace_s": 1.0}}))

    def submit_watched(self) -> JobRow:
        """One Python program: a shell would start a process for each event."""
        pause_s = self.seconds * 0.8 / WATCHED
        program = (
            "import datetime, os, time\n"
            "at = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)\n"
            "with open(os.environ['TRAINMASTER_EVENTS'], 'a', buffering=1) as out:\n"
            f"  for n in range({WATCHED}):\n"
            f"    ts = (at + datetime.timedelta(seconds={APART_S} * n)).isoformat()\n"
            f"    out.write('{LINE}\\n' % (ts, n))\n"
            f"    time.sleep({pause_s})\n"
        )
        spec = {"name": "watched", "target": self.target, "command": [sys.executable, "-c", program]}
        return submitting.submit(self.db, parse_spec({**spec, "preflight": {"level": 0}}))

    async def run(self) -> None:
        async with self._driven():
            watched = await asyncio.to_thread(self.submit_watched)
            began = time.monotonic()
            workers = [asyncio.create_task(self._come_and_go(began)) for _ in self.machines.hosts[1:]]
            while time.monotonic() - began < self.seconds:
                self._sample(time.monotonic() - began)
                await asyncio.sleep(min(5.0, self.seconds / 20))
                if len(self.samples) % 7 == 0:
                    self.random.choice(self.machines.hosts).cut(also_server=False)
                    self.verdict.cuts += 1
            done = [job for worker in workers for job in await worker]
            ended = [*done, await self._end(watched)]
            await self._connect_all()
            self.verdict.connections = sum(1 for host in self.machines.hosts if host.connections())
        self.verdict.seconds = round(time.monotonic() - began, 1)
        self._judge(ended, watched)

    @contextlib.asynccontextmanager
    async def _driven(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconcile.run(self.db, self.home, stop=stop, tick_s=min(0.5, self.seconds / 200)))
        try:
            yield
        finally:
            stop.set()
            await loop

    async def _come_and_go(self, began: float) -> list[JobRow]:
        done = []
        while time.monotonic() - began < self.seconds:
            kind = self.random.choices(list(ENDS), weights=(6, 2, 2))[0]
            done.append(await self._end(await asyncio.to_thread(self.submit, kind)))
        return done

    async def _end(self, job: JobRow) -> JobRow:
        while True:
            now = await asyncio.to_thread(find_job, self.db, job.id)
            assert now is not None
            if now.status.final:
                return now
            if now.name == "cancel" and now.status is Status.RUNNING and self._steps(job) and not now.cancel_requested:
                await asyncio.to_thread(submitting.cancel, self.db, job.id)
            await asyncio.sleep(0.1)

    def _steps(self, job: JobRow) -> list[int]:
        rows = events.list_events(self.db, job.id, phase="STEP", limit=10_000)
        return [int(row.data["step"]) for row in rows]

    async def _connect_all(self) -> None:
        """Ask every host: one whose connection was cut last is connected again."""
        target = targets.load(self.target)
        assert isinstance(target, Lists)
        if left := await target.list_owned():
            self.verdict.wrong.append(f"hosts still hold {', '.join(one.attempt for one in left)}")

    def _sample(self, at_s: float) -> None:
        gc.collect()
        memory_mib = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        self.samples.append((memory_mib, sum(1 for _ in Path("/proc/self/fd").iterdir())))
        if len(self.samples) % 12 == 1:
            print(f"{at_s:6.0f} s: {memory_mib:.1f} MiB, {self.samples[-1][1]} descriptors", flush=True)

    def _judge(self, ended: list[JobRow], watched: JobRow) -> None:
        verdict, wrong = self.verdict, self.verdict.wrong
        verdict.jobs = dict(Counter(str(job.status) for job in ended))
        for job in ended:
            if job.status is not ENDS.get(job.name, Status.COMPLETED):
                wrong.append(f"{job.name} {job.id}: {job.status} ({job.reason}: {job.message})")
            steps = self._steps(job)
            if job.name != "watched" and steps != [1, 2, 3, 4, 5][: len(steps)]:
                wrong.append(f"{job.name} {job.id}: steps {steps}")
            if job.name in ("complete", "fail") and len(steps) != 5:
                wrong.append(f"{job.name} {job.id}: {len(steps)} of 5 events")
        rows = events.list_events(self.db, watched.id, phase="STEP", limit=10_000)
        if [int(row.data["step"]) for row in rows] != list(range(WATCHED)):
            wrong.append(f"watched: {len(rows)} of {WATCHED} events, or another order")
        times = [row.ts for row in rows if row.ts is not None]
        verdict.watched_events = len(rows)
        verdict.watched_hours = round((times[-1] - times[0]).total_seconds() / 3600, 2) if times else 0.0
        third = max(1, len(self.samples) // 3)
        parts = [self.samples[:third], self.samples[third : 2 * third], self.samples[2 * third :]]
        verdict.memory_mib = [round(statistics.median(one for one, _ in part), 1) for part in parts]
        verdict.files = [int(statistics.median(one for _, one in part)) for part in parts]
        if verdict.memory_mib[2] - verdict.memory_mib[1] > GROWTH_MIB:
            wrong.append(f"memory grew from {verdict.memory_mib[1]} to {verdict.memory_mib[2]} MiB")
        if verdict.files[2] - verdict.files[1] > 8:
            wrong.append(f"open descriptors grew from {verdict.files[1]} to {verdict.files[2]}")
        if verdict.connections != len(self.machines.hosts):
            wrong.append(f"{verdict.connections} of {len(self.machines.hosts)} hosts are connected")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--hosts", type=int, default=3, help="one has the watched job")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with bench("ssh-soak", args.hosts) as (machines, home, target):
        db = open_database(home / "trainmaster.db")
        soak = Soak(
            db=db, home=home, target=target, machines=machines, seconds=args.minutes * 60,
            random=random.Random(args.seed),
        )  # fmt: skip
        asyncio.run(soak.run())
        db.close()
    print(json.dumps(asdict(soak.verdict)))
    return 1 if soak.verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
