"""Seed 004, phase 3.3: monitoring of global.json over SSH. One test per checkbox, on a real OpenSSH server."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sshd import lab, needs_sshd
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.storage import open_store
from trainmaster.store import attempts, events
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database
from trainmaster.store.rows import JobRow

STEPS = pytest.mark.matrix(one_in=5, of="steps of a rented box", by_file=True)
pytestmark = [STEPS, pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]


def line(epoch: int) -> str:
    data = {"avg_loss": 1 / (epoch + 1)}
    return json.dumps(
        {"ts": "2025-11-06T10:00:00", "phase": "TRAINING", "event": "epoch_complete", "iteration": 1, "epoch": epoch,
         "data": data}
    )  # fmt: skip


class Monitor:
    """A control plane that watches one machine behind sshd."""

    def __init__(self, folder: Path, home: Path, target: str) -> None:
        self.folder, self.home, self.target = folder, home, target
        self.db: Database = open_database(folder / "trainmaster.db")

    def run(self, script: str, also: Callable[[JobRow, Path], None] = lambda *_: None, tick_s: float = 0.05) -> JobRow:
        """Run a script as a job; `also` gets the job and its working folder meanwhile."""
        spec: dict[str, Any] = {"name": "m", "target": self.target, "command": ["sh", "-c", script]}
        job = submitting.submit(self.db, parse_spec({**spec, "preflight": {"level": 0}}))

        async def go() -> JobRow:
            stop = asyncio.Event()
            loop = asyncio.create_task(reconcile.run(self.db, self.folder, stop=stop, tick_s=tick_s))
            try:
                while (now := find_job(self.db, job.id)) is not None and not now.status.final:
                    also(now, self.work(job))
                    await asyncio.sleep(0.02)
                assert now is not None
                return now
            finally:
                stop.set()
                await loop

        return asyncio.run(go())

    def work(self, job: JobRow) -> Path:
        return self.home / ".trainmaster" / "jobs" / job.id / "work"

    def epochs(self, job: JobRow) -> list[int | None]:
        return [row.epoch for row in events.list_events(self.db, job.id, phase="TRAINING", limit=1000)]


@pytest.fixture(scope="module")
def monitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitor]:
    folder = tmp_path_factory.mktemp("home")
    with lab(tmp_path_factory.mktemp("lab")) as machine:
        box = machine.start("box")
        machine.wait()
        entry = {"host": "127.0.0.1", "name": "box", "port": box.port, "key": str(machine.key)}
        document = {"known_hosts": str(machine.known_hosts), "hosts": [{**entry, "python": sys.executable}]}
        (folder / "hosts.yaml").write_text(yaml.safe_dump(document))
        made = Monitor(folder, box.home, f"ssh:{folder / 'hosts.yaml'}")
        yield made
        made.db.close()


@pytest.fixture(scope="module")
def done(monitor: Monitor) -> JobRow:
    """A job that wrote three epochs into global.json of its working folder."""
    script = "; ".join(f"echo '{line(epoch)}' >> global.json" for epoch in (1, 2, 3))
    job = monitor.run(script)
    assert job.status is Status.COMPLETED, (job.reason, job.message)
    return job


def test_can_locate_global_json_file_on_gpu_server(monitor: Monitor, done: JobRow) -> None:
    assert len((monitor.work(done) / "global.json").read_text().splitlines()) == 3


def test_can_download_global_json(monitor: Monitor, done: JobRow) -> None:
    stored = open_store(monitor.folder / "storage").get(f"jobs/{done.id}/attempts/1/events.jsonl").decode()
    assert [json.loads(text)["epoch"] for text in stored.splitlines() if "epoch_complete" in text] == [1, 2, 3]


def test_can_parse_json_lines_correctly(monitor: Monitor, done: JobRow) -> None:
    rows = events.list_events(monitor.db, done.id, phase="TRAINING", limit=10)
    assert [(row.epoch, row.data["avg_loss"]) for row in rows] == [(1, 1 / 2), (2, 1 / 3), (3, 1 / 4)]
    assert {row.ts.isoformat() for row in rows if row.ts} == {"2025-11-06T04:30:00+00:00"}  # Indian time


def test_handles_incomplete_json_gracefully(monitor: Monitor) -> None:
    half, rest = line(7)[:40], line(7)[40:]
    counts: set[int] = set()

    def look(now: JobRow, work: Path) -> None:
        if (work / "half").exists() and now.status is Status.RUNNING:
            counts.add(len(monitor.epochs(now)))
            (work / "go").touch()

    script = f"printf '%s' '{half}' >> global.json; touch half; until [ -e go ]; do sleep 0.05; done; "
    job = monitor.run(script + f"sleep 0.5; echo '{rest}' >> global.json", look)
    assert job.status is Status.COMPLETED and monitor.epochs(job) == [7]
    assert counts == {0} or counts == {0, 1}


def test_detects_new_lines_since_last_poll(monitor: Monitor) -> None:
    """Each line is written only after the one before it was seen in the database."""

    def answer(now: JobRow, work: Path) -> None:
        for epoch in monitor.epochs(now):
            (work / f"seen-{epoch}").touch()

    wait = "until [ -e seen-{0} ]; do sleep 0.05; done"
    steps = [f"echo '{line(epoch)}' >> global.json; {wait.format(epoch)}" for epoch in range(5)]
    job = monitor.run("; ".join(steps), answer)
    assert job.status is Status.COMPLETED and monitor.epochs(job) == [0, 1, 2, 3, 4]


def test_polling_interval_works_correctly(monitor: Monitor) -> None:
    """With the seed's five seconds between two polls, ten lines of one second come in at most two reads, all.

    A busy machine writes them more slowly: then there is one more read for every five seconds.
    """
    counts: set[int] = set()
    began = time.monotonic()
    steps = "; ".join(f"echo '{line(epoch)}' >> global.json; sleep 0.1" for epoch in range(10))
    job = monitor.run(steps, lambda now, _: counts.add(len(monitor.epochs(now))), tick_s=5.0)
    assert job.status is Status.COMPLETED and monitor.epochs(job) == list(range(10))
    polls = 2 + int((time.monotonic() - began) / 5.0)
    assert len(counts - {0}) <= polls, f"seen after {sorted(counts)} lines: polled more often than told"


def test_handles_missing_global_json_initially(monitor: Monitor) -> None:
    missing: list[bool] = []

    def look(now: JobRow, work: Path) -> None:
        if now.status is Status.RUNNING and work.exists() and not (work / "go").exists():
            missing.append((work / "global.json").exists())
            (work / "go").touch()

    job = monitor.run(f"until [ -e go ]; do sleep 0.05; done; echo '{line(1)}' >> global.json", look)
    assert job.status is Status.COMPLETED and missing == [False] and monitor.epochs(job) == [1]


def test_stops_when_training_completes(monitor: Monitor, done: JobRow) -> None:
    (attempt,) = attempts.list_attempts(monitor.db, done.id)
    assert attempt.exit is not None and attempt.released_at is not None
    with (monitor.work(done) / "global.json").open("a") as file:
        file.write(line(99) + "\n")  # nobody reads it any more
    later = monitor.run("true")
    assert later.status is Status.COMPLETED and monitor.epochs(done) == [1, 2, 3]
