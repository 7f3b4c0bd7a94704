"""Jobs on this machine, from the submit to the last row, with real processes throughout."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from store.rows import count_faults
from trainmaster.control import reconcile as reconciling
from trainmaster.control import submit as submitting
from trainmaster.core.plan import ATTEMPT_VARIABLE
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.store import attempts, events
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job, list_transitions
from trainmaster.store.rows import JobRow

SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(autouse=True)
def _agents_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)


def submit(db: Database, program: str, **more: Any) -> JobRow:
    mapping = {"name": "real", "command": [sys.executable, "-c", program], "preflight": {"level": 0}, **more}
    return submitting.submit(db, parse_spec(mapping))


def find(db: Database, job: JobRow) -> JobRow:
    row = find_job(db, job.id)
    assert row is not None
    return row


def reconcile(db: Database, home: Path, *jobs: JobRow, act: Callable[[], None] = lambda: None) -> list[JobRow]:
    """The real loop until the jobs are final; `act` is called at every look."""

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconciling.run(db, home, stop=stop, tick_s=0.1))
        while not all(find(db, job).status.final for job in jobs):
            act()
            await asyncio.sleep(0.05)
        stop.set()
        await loop

    asyncio.run(main())
    return [find(db, job) for job in jobs]


def processes_of(attempt: str) -> list[int]:
    """Every process that carries the attempt's name in its environment."""
    mark = f"{ATTEMPT_VARIABLE}={attempt}".encode()
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
            except OSError:
                continue
    return pids


SLEEP = "import time; time.sleep(600)"


def test_a_good_job_completes_and_a_bad_one_says_why(db: Database, tmp_path: Path) -> None:
    good = submit(db, "print('hello')", resources={"processes_per_node": 2})
    bad = submit(db, "import sys; print('no such thing'); sys.exit(3)", limits={"attempts": 3})
    good, bad = reconcile(db, tmp_path, good, bad)
    assert (good.status, good.reason, good.attempts) == (Status.COMPLETED, None, 1)
    assert (bad.status, bad.reason, bad.attempts) == (Status.FAILED, Reason.SCRIPT_FAILED, 1)
    (attempt,) = attempts.list_attempts(db, bad.id)
    assert attempt.exit is not None and attempt.exit.exit_codes == {"0": 3}
    assert "no such thing" in str(attempt.exit.evidence)
    ends = [events.find_event(db, f"{job.id}.1", phase="PROJECT", event="end") for job in (good, bad)]
    assert [end.data["ok"] for end in ends if end is not None] == [True, False]
    assert count_faults(db, good.id) == 0


def test_cancel_stops_what_runs(db: Database, tmp_path: Path) -> None:
    job = submit(db, SLEEP, resources={"processes_per_node": 2}, limits={"grace_s": 1})

    def act() -> None:
        now = find(db, job)
        if now.stage is Stage.RUNNING and not now.cancel_requested and len(processes_of(f"{job.id}.1")) >= 3:
            submitting.cancel(db, job.id)

    (job,) = reconcile(db, tmp_path, job, act=act)
    assert (job.status, job.reason) == (Status.CANCELLED, Reason.USER_CANCELLED)
    assert processes_of(f"{job.id}.1") == []
    assert [move.status for move in list_transitions(db, job.id)][-2:] == [Status.CANCELLING, Status.CANCELLED]


def test_a_job_cancelled_before_its_start_never_starts(db: Database, tmp_path: Path) -> None:
    job = submit(db, SLEEP)
    submitting.cancel(db, job.id)
    (job,) = reconcile(db, tmp_path, job)
    assert (job.status, job.attempts) == (Status.CANCELLED, 0)
    assert not (tmp_path / "jobs").exists()


@pytest.mark.proof
def test_a_lost_attempt_is_cleared_away_and_the_next_one_completes(db: Database, tmp_path: Path) -> None:
    """The agent is killed with SIGKILL and its rank lives on; the next attempt must not run beside it."""
    waits_once = f"import os\nif os.environ['{ATTEMPT_VARIABLE}'].endswith('.1'):\n    {SLEEP}"
    job = submit(db, waits_once, limits={"attempts": 2})
    killed: list[int] = []

    def act() -> None:
        lock = tmp_path / "jobs" / job.id / "attempts" / "1" / "agent.lock"
        if not killed and find(db, job).stage is Stage.RUNNING and len(processes_of(f"{job.id}.1")) >= 2:
            killed.append(int(lock.read_text().split()[1]))
            os.kill(killed[0], signal.SIGKILL)

    (job,) = reconcile(db, tmp_path, job, act=act)
    assert killed and (job.status, job.attempts) == (Status.COMPLETED, 2)
    first, second = attempts.list_attempts(db, job.id)
    assert (first.report, first.reason) == (TargetState.LOST, Reason.NODE_LOST)
    assert second.report is TargetState.SUCCEEDED
    assert processes_of(first.id) == []


ODD_LINES = r"""
import os, time
path = os.environ["TRAINMASTER_EVENTS"]
def put(raw):
    with open(path, "ab") as file:
        file.write(raw)
while b"HEARTBEAT" not in open(path, "rb").read():  # the next is ten seconds away, and would close our half line
    time.sleep(0.01)
put(b'{"ts":"2025-11-04 10:00:00","phase":"TRAINING","event":"start"}\n')
put(b'this is no event\n')
put(b'{"ts":"2025-11-04T04:31:00Z","phase":"DREAMING","event":"deep"}\n')
put(b'{"ts":"2025-11-04 10:02:00","phase":"TRAI')
time.sleep(0.3)
put(b'NING","event":"end"}\n{"phase":"TRAINING","event":"never fini')
"""


@pytest.mark.proof
@pytest.mark.parametrize(("zone", "hour"), [({}, 10.0), ({"zone": "Asia/Kolkata"}, 4.5)])
def test_odd_lines_are_kept_as_they_are(db: Database, tmp_path: Path, zone: dict[str, str], hour: float) -> None:
    job = submit(db, ODD_LINES, **zone)
    (job,) = reconcile(db, tmp_path, job)
    assert job.status is Status.COMPLETED
    rows = [row for row in events.list_events(db, job.id) if row.phase not in ("PROJECT", "HEARTBEAT")]
    *whole, half = rows
    assert [(row.phase, row.event) for row in whole] == [
        ("TRAINING", "start"),
        (None, None),
        ("DREAMING", "deep"),
        ("TRAINING", "end"),
    ]
    assert whole[1].text == "this is no event" and "not JSON" in str(whole[1].fault)
    start, other, end = whole[0].ts, whole[2].ts, whole[3].ts
    assert start is not None and start.hour + start.minute / 60 == hour, "a time without a zone is read in the spec's"
    assert other is not None and (other.hour, other.minute) == (4, 31), "a time that says its zone is not moved"
    assert end is not None and (end - start).total_seconds() == 120
    # The agent closes the half line before it writes its own: it spoils no other.
    assert half.phase is None and half.text == '{"phase":"TRAINING","event":"never fini'
