"""The control plane is killed again and again under a running job; nothing is lost, doubled or started twice.

Everything here is real: processes, SIGKILL, the database, the local target and its agent.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmaster.api.events import Event
from trainmaster.control import submit as submitting
from trainmaster.core.event_catalog import CHECK_VARIABLE
from trainmaster.core.events import Line, split
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status, TargetState
from trainmaster.store import attempts, events
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow

from .drill.warm import Warm

pytestmark = pytest.mark.both_databases

SOURCE = Path(__file__).parents[2] / "src"
BLOCKS, EVENTS_PER_BLOCK = 6, 40

# Each rank appends its own numbered events; the file interleaves them as it happens. Each block of events waits for a
# file: however slow the machine is, every life of the control plane has something of its own to see.
WORKLOAD = f"""
import os, pathlib, time
from trainmaster.node.emit import Emitter
rank = int(os.environ["RANK"])
with Emitter(os.environ["TRAINMASTER_EVENTS"]) as events:
    for n in range({BLOCKS * EVENTS_PER_BLOCK}):
        gate = pathlib.Path(os.environ["TRAINMASTER_CHECKPOINTS"], f"go-{{n // {EVENTS_PER_BLOCK}}}")
        while not gate.exists():
            time.sleep(0.01)
        events.emit("STEP", "metrics", epoch=rank, step=n, loss=1 / (n + 1), text="é" * (n % 7))
        time.sleep(float(os.environ["PAUSE_S"]))
"""


def submit(db: Database, *, pause_s: float) -> JobRow:
    # A workload's events are its own: the catalogue does not bind them.
    env = {"PYTHONPATH": str(SOURCE), "PAUSE_S": str(pause_s), CHECK_VARIABLE: ""}
    resources = {"processes_per_node": 2}
    command = [sys.executable, "-c", WORKLOAD]
    mapping = {"name": "kill", "command": command, "env": env, "resources": resources, "preflight": {"level": 0}}
    return submitting.submit(db, parse_spec(mapping))


class Controller:
    """`python -m trainmaster.control` as a process that can be killed."""

    def __init__(self, warm: Warm, db: Database, home: Path) -> None:
        self.warm, self.home = warm, home
        url = db.engine.url.render_as_string(hide_password=False)
        env = {"PYTHONPATH": str(SOURCE), "TRAINMASTER_DATABASE": url}
        self.pid = warm.start([str(home), "--tick-s", "0.02"], env=env, log=home / "control.log")

    def check(self) -> None:
        assert self.warm.poll(self.pid) is None, (self.home / "control.log").read_text()

    def end(self, number: signal.Signals) -> int:
        return self.warm.end(self.pid, number)


@pytest.fixture
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.close()


def find(db: Database, job: JobRow) -> JobRow:
    row = find_job(db, job.id)
    assert row is not None
    return row


def run_to_its_end(warm: Warm, db: Database, home: Path, *jobs: JobRow) -> None:
    controller = Controller(warm, db, home)
    while not all(find(db, job).status.final for job in jobs):
        controller.check()
        time.sleep(0.02)
    assert controller.end(signal.SIGTERM) == 0


def as_line(row: Event) -> tuple[object, ...]:
    return row.offset, row.length, row.ts, row.seq, row.phase, row.event, row.epoch, row.data, row.fault, row.text


def from_file(line: Line) -> tuple[object, ...]:
    event = line.event
    assert event is not None, line
    return (line.offset, line.length, event.ts, event.seq, event.phase, event.event, event.epoch, event.data,
            line.fault, line.text)  # fmt: skip


def told(rows: list[Event]) -> list[object]:
    """What the job said, apart from when: in each rank's own order, without heartbeats, names and times."""
    return sorted(
        (row.phase or "", row.event or "", row.epoch or 0, row.data.get("step", 0), str(row.data.get("text")))
        for row in rows
        if row.phase != "HEARTBEAT"
    )


def check(db: Database, home: Path, job: JobRow) -> list[Event]:
    """The job is completed in one attempt, and its rows are its file: offset by offset, value by value."""
    assert find(db, job).status is Status.COMPLETED, (home / "control.log").read_text()
    (attempt,) = attempts.list_attempts(db, job.id)
    assert attempt.report is TargetState.SUCCEEDED
    content = (home / "jobs" / job.id / "attempts" / "1" / "events.jsonl").read_bytes()
    rows = events.list_events(db, job.id, limit=100_000)
    assert [as_line(row) for row in rows] == [
        from_file(line)
        for line in split(content, offset=0, zone=rows[0].ts.tzinfo, last=True)  # type: ignore[union-attr]
    ]
    assert sum(row.length for row in rows) == len(content)
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    return rows


def open_gates(home: Path, job: JobRow, *blocks: int) -> None:
    folder = home / "jobs" / job.id / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for block in blocks:
        (folder / f"go-{block}").touch()


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
def test_killed_at_any_moments_the_job_is_told_as_if_undisturbed(db: Database, tmp_path: Path, warm: Warm) -> None:
    moments = random.Random(1)
    job = submit(db, pause_s=0.02)
    # While it starts and submits: at moments that depend on nothing but the clock.
    for _ in range(3):
        controller = Controller(warm, db, tmp_path)
        time.sleep(moments.uniform(0.2, 1.0))
        controller.end(signal.SIGKILL)
    # While events flow: somewhere behind the first new row that this life kept.
    for block in range(BLOCKS):
        before = len(events.list_events(db, job.id, limit=100_000))
        controller = Controller(warm, db, tmp_path)
        open_gates(tmp_path, job, block)
        while len(events.list_events(db, job.id, limit=100_000)) == before:
            controller.check()
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.3))
        controller.end(signal.SIGKILL)
    run_to_its_end(warm, db, tmp_path, job)
    disturbed = check(db, tmp_path, job)

    other = submit(db, pause_s=0.001)
    open_gates(tmp_path, other, *range(BLOCKS))
    run_to_its_end(warm, db, tmp_path, other)
    undisturbed = check(db, tmp_path, other)
    assert told(disturbed) == told(undisturbed)
    assert sum(row.phase == "STEP" for row in disturbed) == 2 * BLOCKS * EVENTS_PER_BLOCK
