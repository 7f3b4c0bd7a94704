"""Seed 004, phase 4.6 and the end of 4.1: a real job is watched while it runs, by the real reconciler.

The program writes `global.json` in its working folder, as seed 004's does. It goes on from one part to the next only
when the rows of the part before were seen in the database: what is asserted here was true while it ran.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.store import events
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

from .lines import job_of, records

SOURCE = str(Path(__file__).parents[2] / "src")
PROGRAM = """
import json, os, pathlib, sys, time
os.chdir(sys.argv[1])
os.symlink(os.environ["TRAINMASTER_EVENTS"], "global.json")  # from here on as its authors wrote it
def say(phase, event, **more):
    with open("global.json", "a") as file:
        file.write(json.dumps({"timestamp": "x", "phase": phase, "event": event, **more}) + "\\n")
def wait(part):
    while not pathlib.Path(part).exists():
        time.sleep(0.02)
say("GROUP_ITERATION", "start", data={"config": {"iterations": 1}})
say("ITERATION", "start", iteration=1)
wait("iteration")
for epoch in (1, 2):
    say("TRAINING", "epoch_complete", iteration=1, epoch=epoch, data={"avg_loss": 1 / epoch})
    wait(f"epoch-{epoch}")
say("EVAL_MODEL", "metrics", iteration=1, data={"model_id": "m", "metrics": {"f1": 0.5}})
say("ITERATION", "end", iteration=1, data={"duration": 3.0})
"""


@dataclass
class Seen:
    """What was in the database at each moment."""

    job_id: str
    statuses: list[Status] = field(default_factory=list)
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    stops: int = 0


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = open_database(tmp_path_factory.mktemp("watched") / "trainmaster.db")
    yield database
    database.close()


@pytest.fixture(scope="module")
def seen(db: Database, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """One job from its submission to its end. After each part the watching is stopped and begun again."""
    home, work = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("work")
    command = [sys.executable, "-c", PROGRAM, str(work)]
    job = submitting.submit(db, parse_spec({"name": "seed", "command": command, "preflight": {"level": 0}}))
    state = Seen(job_id=job.id, statuses=[job.status])
    parts = {
        "iteration": lambda now: now["iterations"],
        "epoch-1": lambda now: len(now["epochs"]) == 1,
        "epoch-2": lambda now: len(now["epochs"]) == 2,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SOURCE)
        for part, there in parts.items():
            asyncio.run(_watch(db, home, state, lambda there=there: bool(there(records(db, job.id)))))
            state.moments[part] = records(db, job.id)
            (work / part).touch()
        asyncio.run(_watch(db, home, state, lambda: job_of(db, job.id).status.final))
    state.moments["end"] = records(db, job.id)
    return state


async def _watch(db: Database, home: Path, seen: Seen, until: Any) -> None:
    stop = asyncio.Event()
    loop = asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=0.1))
    while not until():
        assert not loop.done(), loop.exception()
        await asyncio.sleep(0.02)
        status = job_of(db, seen.job_id).status
        if status is not seen.statuses[-1]:
            seen.statuses.append(status)
    stop.set()
    await loop  # ends by itself, and without an error
    seen.stops += 1


def test_project_end_marks_job_completed(db: Database, seen: Seen) -> None:
    """The agent writes PROJECT end; the job is completed on its exit record, and says how long the project took."""
    (end,) = events.list_events(db, seen.job_id, phase="PROJECT")[1:]
    assert end.event == "end" and end.data["ok"] is True
    job = job_of(db, seen.job_id)
    assert job.status is Status.COMPLETED and job.ended_at is not None
    assert job.time_taken == end.data["time_taken"]


def test_job_status_pending_running_completed(seen: Seen) -> None:
    assert seen.statuses == [Status.PENDING, Status.RUNNING, Status.COMPLETED]


def test_iteration_records_created_in_real_time(seen: Seen) -> None:
    (row,) = seen.moments["iteration"]["iterations"]
    assert row["number"] == 1 and row["time_taken"] is None
    assert seen.moments["end"]["iterations"][0]["time_taken"] == 3.0


def test_epoch_metrics_updated_as_training_progresses(seen: Seen) -> None:
    losses = {part: [row["avg_loss"] for row in now["epochs"]] for part, now in seen.moments.items()}
    assert losses == {"iteration": [], "epoch-1": [1.0], "epoch-2": [0.5, 1.0], "end": [0.5, 1.0]}


def test_evaluation_results_stored_correctly(seen: Seen) -> None:
    (row,) = seen.moments["end"]["evals"]
    assert (row["model_id"], row["metrics"], row["iteration"]) == ("m", {"f1": 0.5}, 1)


def test_monitor_can_be_stopped_gracefully(db: Database, seen: Seen) -> None:
    """It was stopped four times, went on where it was, and took every line in once."""
    assert seen.stops == 4
    lines = [row for row in events.list_events(db, seen.job_id) if row.phase not in ("PROJECT", "HEARTBEAT")]
    assert [row.event for row in lines if row.phase == "TRAINING"] == ["epoch_complete"] * 2
    assert len({row.offset for row in lines}) == len(lines) == 6


def test_global_json_is_read_as_the_event_stream(db: Database, seen: Seen) -> None:
    """A program that only knows `global.json` needs one link to the file that TRAINMASTER_EVENTS names."""
    rows = events.list_events(db, seen.job_id, phase="GROUP_ITERATION")
    assert [(row.stream, row.extra) for row in rows] == [("events.jsonl", {"timestamp": "x"})]
