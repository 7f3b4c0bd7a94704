"""A program that writes `global.json` into its working folder: every job has its own, and every line becomes a row."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from store.rows import list_open
from trainmaster.control import checkpoints, reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.errors import SpecError
from trainmaster.core.events import parse
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.store import attempts, events, jobs
from trainmaster.store.database import Database
from trainmaster.store.page_rows import iterations

PROGRAM = """
import json, sys, time
for epoch in (1, 2, 3):
    line = {"timestamp": f"2025-11-04T10:00:0{epoch}", "phase": "TRAINING", "event": "epoch_complete",
            "iteration": 1, "epoch": epoch, "data": {"avg_loss": float(sys.argv[1])}}
    with open("global.json", "a") as file:
        file.write(json.dumps(line) + "\\n")
    time.sleep(0.3)
"""


def run_all(db: Database, home: Path, ids: list[str]) -> None:
    async def go() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=0.05))
        end = time.monotonic() + 120
        while await asyncio.to_thread(list_open, db) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        stop.set()
        await task

    asyncio.run(go())
    assert [getattr(jobs.find_job(db, job_id), "status", None) for job_id in ids] == [Status.COMPLETED] * len(ids)


@pytest.mark.spawns
def test_inputs_of_a_local_job_lie_in_its_working_folder(db: Database, tmp_path: Path) -> None:
    for name in ("sets/train.jsonl", "sets/c.yaml", "bin/go.sh"):
        place = tmp_path / "home" / "storage" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"#!/bin/sh\ngrep -q sets/train data/train.jsonl && grep -q c.yaml configs/c.yaml # {name}")
    inputs = {"train": "sets/train.jsonl", "config": "sets/c.yaml", "script": "bin/go.sh"}
    spec = {"name": "seed", "command": ["./scripts/go.sh"], "inputs": inputs, "preflight": {"level": 0}}
    run_all(db, tmp_path / "home", [submitting.submit(db, parse_spec(spec)).id])


def test_inputs_are_refused_where_the_target_brings_none(db: Database, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("kind: job\nimage: x\n")
    spec = {
        "name": "a",
        "command": ["x"],
        "inputs": {"train": "sets/x"},
        "target": f"kubernetes:{tmp_path}/cluster.yaml",
    }
    with pytest.raises(SpecError, match="brings no inputs to its machines"):
        submitting.submit(db, parse_spec(spec))


@pytest.mark.parametrize("place", ["jobs/x/outputs/m.bin", "./jobs/x", "jobs//x", ".//workdirs/p/x", "Jobs/x", "jobs"])
def test_inputs_of_a_job_are_refused_before_there_is_a_row(db: Database, place: str) -> None:
    """They were refused at the start, after a row, an attempt and a wait."""
    with pytest.raises(SpecError, match=r"inputs\.config: this belongs to a job"):
        submitting.submit(db, parse_spec({"name": "a", "command": ["x"], "inputs": {"config": place}}))
    assert jobs.list_jobs(db) == []


@pytest.mark.parametrize("folder", ["~/run", "~", "~root/run", "~nobody"])
def test_a_checkpoint_folder_is_a_whole_path(db: Database, folder: str) -> None:
    """A folder called `~root` was made in the working folder; `fetch` looked for it in that of the server."""
    for part in ({"folder": folder}, {"memory": {"folder": folder}}):
        with pytest.raises(SpecError, match="`~` is not expanded here"):
            submitting.submit(db, parse_spec({"name": "a", "train": {"checkpoint": part}}))


def test_a_relative_checkpoint_folder_is_that_of_the_working_folder(db: Database, tmp_path: Path) -> None:
    spec = {"name": "a", "train": {"checkpoint": {"folder": "mine"}}}
    job = submitting.submit(db, parse_spec(spec))
    saved = tmp_path / "jobs" / job.id / "work" / "mine" / "step-00000003"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text('{"files": {}}')
    assert checkpoints.find_newest(tmp_path, job).folder == saved


@pytest.mark.proof
@pytest.mark.spawns
def test_three_jobs_at_once_each_keep_all_their_rows(db: Database, tmp_path: Path) -> None:
    script = tmp_path / "project"
    script.mkdir()
    (script / "train.py").write_text(PROGRAM)
    ids = []
    for number in (1, 2, 3):
        command = [sys.executable, "train.py", str(number)]
        spec = {"name": "seed", "command": command, "workdir": str(script), "preflight": {"level": 0}}
        ids.append(submitting.submit(db, parse_spec(spec)).id)
    run_all(db, tmp_path / "home", ids)
    for number, job_id in zip((1, 2, 3), ids, strict=True):
        (iteration,) = iterations.list_iterations(db, job_id)
        rows = iterations.list_epochs(db, iteration.id)
        assert [(row.number, row.avg_loss) for row in rows] == [(1, number), (2, number), (3, number)]
        assert rows[0].at == datetime(2025, 11, 4, 4, 30, 1, tzinfo=UTC), "a time of global.json is Indian"
        assert len(events.list_events(db, job_id, phase="TRAINING")) == 3
    assert not (script / "global.json").exists()


@pytest.mark.parametrize(
    ("line", "hour"),
    [
        (b'{"ts":"2025-11-04T10:00:00 IST","phase":"A","event":"b"}', 4),
        (b'{"timestamp":"2025-11-04 10:00:00 IST","phase":"A","event":"b"}', 4),
        (b'{"timestamp":"2025-11-04T10:00:00","phase":"A","event":"b"}', 10),
        (b'{"timestamp":"2025-11-04T10:00:00Z","phase":"A","event":"b"}', 10),
    ],
)
def test_times_of_other_programs_are_read(line: bytes, hour: int) -> None:
    event, fault = parse(line, zone=UTC)
    assert event is not None and fault is None and event.ts is not None
    assert event.ts.hour == hour and "timestamp" not in event.extra


def test_a_timestamp_that_is_no_time_stays_where_it_was() -> None:
    event, fault = parse(b'{"timestamp":"soon","phase":"A","event":"b"}', zone=UTC)
    assert event is not None and fault is None and event.extra == {"timestamp": "soon"}


@pytest.mark.matrix(one_in=2)
@pytest.mark.spawns
@pytest.mark.parametrize(
    ("script", "retry", "made", "reason"),
    [
        ("kill -9 $$", {}, 2, Reason.CRASHED),
        ("kill -SEGV $$", {}, 2, Reason.CRASHED),
        ("exit 3", {}, 1, Reason.SCRIPT_FAILED),
        ("exit 3", {"script_failed": True}, 2, Reason.SCRIPT_FAILED),
        ("kill -9 $$", {"crashed": False}, 1, Reason.CRASHED),
    ],
)
def test_the_reason_decides_whether_there_is_another_attempt(
    db: Database, tmp_path: Path, script: str, retry: dict[str, bool], made: int, reason: Reason
) -> None:
    limits = {"attempts": 2, "retry": retry}
    spec = {"name": "a", "command": ["sh", "-c", script], "preflight": {"level": 0}, "limits": limits}
    job = submitting.submit(db, parse_spec(spec))

    async def go() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(reconcile.run(db, tmp_path, stop=stop, tick_s=0.05, rest_s=lambda _r, _n: 0.0))
        end = time.monotonic() + 90
        while await asyncio.to_thread(list_open, db) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        stop.set()
        await task

    asyncio.run(go())
    row = jobs.find_job(db, job.id)
    assert row is not None and (row.status, row.reason) == (Status.FAILED, reason)
    assert len(attempts.list_attempts(db, job.id)) == made


def test_a_reason_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match=r"limits\.retry\.bad_luck"):
        parse_spec({"name": "a", "command": ["true"], "limits": {"retry": {"bad_luck": True}}})
