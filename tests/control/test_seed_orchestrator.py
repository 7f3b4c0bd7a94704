"""Seed 004, phases 5.1, 5.2 and 7.4: every line of its plan for the orchestrator, on real parts.

One job of 3 iterations with 5 epochs runs on this machine, with a real S3 server for what it leaves; most lines are
read off it. Lines about a cloud's machine are shown on the place there is: this machine, where an "instance" is an
attempt with its processes.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from s3_server import S3
from trainmaster import targets
from trainmaster.control import submit as submitting
from trainmaster.control.context import Context
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.core.errors import JobFinal, JobMissing, KeyTaken, SpecError, TargetError, Unreachable
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.documents import yaml_file
from trainmaster.storage import Store, open_store
from trainmaster.store import artifacts, attempts, jobs, tables
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.page_rows import iterations as read_records
from trainmaster.store.rows import JobRow

from .drill import workload
from .drill.story import processes_of
from .driving import driven, wait
from .scripted import GOOD, RUNNING, Scripted, at_once, ended, take_over

SOURCE = str(Path(__file__).parents[2] / "src")
ALL = workload.ITERATIONS * workload.EPOCHS


def find(db: Database, job_id: str) -> JobRow:
    row = jobs.find_job(db, job_id)
    assert row is not None
    return row


def settle(db: Database, home: Path, target: Scripted, spec: JobSpec) -> JobRow:
    """A job on a scripted target to its end, by the real loop."""
    job = submitting.submit(db, spec, load=target.load)
    with driven(db, home, open_store(home / "storage"), load=target.load, rest_s=at_once):
        wait(lambda: find(db, job.id).status.final)
    return find(db, job.id)


def scripted_spec(**limits: Any) -> JobSpec:
    return parse_spec({"name": "a", "target": "scripted", "command": ["true"], "limits": limits})


@dataclass
class Seen:
    """The real run, and what was seen of it while it went on."""

    db: Database
    store: Store
    job: JobRow
    as_made: JobRow
    statuses: list[Status] = field(default_factory=list)
    epochs_seen: list[int] = field(default_factory=list)  # rows there were before the next epoch was let through
    iterations_seen: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)  # processes in the middle of it


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[Seen]:
    home = tmp_path_factory.mktemp("orchestrator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SOURCE)
        s3.use(patch)
        db, store = open_database(home / "trainmaster.db"), open_store(f"s3://{s3.bucket}/orchestrator")
        job = submitting.submit(db, parse_spec(workload.spec()))
        state = Seen(db=db, store=store, job=job, as_made=job)
        with driven(db, home, store):
            for number in range(ALL):
                epochs = _count_epochs(db, job)
                state.epochs_seen.append(epochs)
                state.iterations_seen.append(len(read_records.list_iterations(db, job.id)))
                state.statuses.append(find(db, job.id).status)
                workload.gate(home, job.id, number)
                wait(lambda epochs=epochs: _count_epochs(db, job) > epochs)  # type: ignore[misc]
                state.running = state.running or processes_of(job.id)
            wait(lambda: find(db, job.id).status.final)
        state.job = find(db, job.id)
        state.statuses.append(state.job.status)
        yield state
        db.close()


def _count_epochs(db: Database, job: JobRow) -> int:
    return sum(len(read_records.list_epochs(db, row.id)) for row in read_records.list_iterations(db, job.id))


# 5.1 Orchestrator: individual methods


def test_create_training_job_record_creates_db_entry(seen: Seen) -> None:
    made = seen.as_made
    assert (made.status, made.stage, made.attempts, made.name) == (Status.PENDING, Stage.QUEUED, 0, "three-by-five")
    assert find(seen.db, made.id).created_at == made.created_at


def test_build_and_upload_yaml_works_end_to_end(seen: Seen) -> None:
    (row,) = [row for row in artifacts.list_artifacts(seen.db, seen.job.id) if row.path == "project.yaml"]
    content = seen.store.get(f"jobs/{seen.job.id}/project.yaml")
    assert (row.kind, row.size_bytes) == ("project", len(content)) and seen.job.id in content.decode()


def test_launch_gpu_instance_returns_valid_instance(seen: Seen) -> None:
    (attempt,) = attempts.list_attempts(seen.db, seen.job.id)
    assert attempt.handle is not None and attempt.handle["attempt"] == attempt.id
    poll = asyncio.run(targets.load("local").poll(attempt.handle))
    assert poll.state is TargetState.SUCCEEDED, "the handle of the row finds what was launched"


def test_setup_ssh_connection_with_retry_logic(tmp_path: Path) -> None:
    db, target, left = open_database(tmp_path / "t.db"), Scripted(RUNNING, RUNNING, GOOD), [1, 2, 3]

    async def refuse(_attempt: str) -> None:
        if left:
            left.pop()
            raise Unreachable("connection refused")

    target.before["submit"] = refuse
    job = settle(db, tmp_path, target, scripted_spec())
    assert (job.status, job.attempts, target.made("submit")) == (Status.COMPLETED, 1, 4)
    db.close()


def test_transfer_training_files_transfers_all_files(seen: Seen) -> None:
    (attempt,) = attempts.list_attempts(seen.db, seen.job.id)
    assert attempt.handle is not None
    home = Path(str(attempt.handle["folder"])).parents[2]
    plane = Context(db=seen.db, home=home.parent, load=targets.load, token="", storage=seen.store)
    planned = plane.plan(seen.job, 1)
    assert planned.files and all(Path(path).read_text() == text for path, text in planned.files.items())


def test_start_monitoring_starts_background_task(seen: Seen) -> None:
    assert seen.epochs_seen == list(range(ALL)), "each epoch was a row before the next was told"


def test_execute_training_script_runs_non_blocking(seen: Seen) -> None:
    assert len(seen.running) >= 2, "the agent and its rank ran on their own while the rows were written"


def test_wait_for_completion_polls_correctly(tmp_path: Path) -> None:
    db, target = open_database(tmp_path / "t.db"), Scripted(*[RUNNING] * 6, GOOD)
    job = settle(db, tmp_path, target, scripted_spec())
    assert job.status is Status.COMPLETED and target.made("poll") >= 7, "asked until it was over"
    names = [name for name, _ in target.calls]
    assert "poll" not in names[names.index("list") :], "and not afterwards"
    db.close()


def test_download_outputs_transfers_results_to_s3(seen: Seen) -> None:
    stored = {item.path.removeprefix(f"jobs/{seen.job.id}/") for item in seen.store.list(f"jobs/{seen.job.id}")}
    outputs = {f"outputs/model-{number}/weights.bin" for number in (1, 2, 3)}
    logs = {f"attempts/1/{name}" for name in ("events.jsonl", "agent.log", "rank-0.log", "exit.json")}
    assert stored == {row.path for row in artifacts.list_artifacts(seen.db, seen.job.id)} >= outputs | logs
    assert seen.store.get(f"jobs/{seen.job.id}/outputs/model-2/weights.bin") == b"\2" * 100_000
    assert seen.store.get(f"jobs/{seen.job.id}/attempts/1/rank-0.log") == b"done\n"


def test_cleanup_instance_terminates_gpu(seen: Seen) -> None:
    (attempt,) = attempts.list_attempts(seen.db, seen.job.id)
    assert attempt.released_at is not None and processes_of(seen.job.id) == []


def test_mark_job_failed_updates_status(tmp_path: Path) -> None:
    db = open_database(tmp_path / "t.db")
    target = Scripted(RUNNING, RUNNING, ended(TargetState.FAILED, Reason.SCRIPT_FAILED))
    job = settle(db, tmp_path, target, scripted_spec())
    assert (job.status, job.reason, job.message) == (Status.FAILED, Reason.SCRIPT_FAILED, "m")
    assert job.ended_at is not None and target.alive == set()
    db.close()


def test_cancel_job_stops_everything_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    db = open_database(tmp_path / "t.db")
    job = submitting.submit(db, parse_spec(workload.spec(limits={"grace_s": 1})))
    with driven(db, tmp_path, open_store(tmp_path / "storage")):
        wait(lambda: find(db, job.id).stage is Stage.RUNNING and len(processes_of(job.id)) >= 2)
        assert submitting.cancel(db, job.id).status is Status.CANCELLING
        wait(lambda: find(db, job.id).status.final)
    assert (find(db, job.id).status, processes_of(job.id)) == (Status.CANCELLED, [])
    assert attempts.list_attempts(db, job.id)[0].released_at is not None
    assert [row.path for row in artifacts.list_artifacts(db, job.id) if row.kind == "events"], "its log is kept"
    db.close()


# 5.2 Full orchestrator workflow


def test_complete_run_from_start_to_finish(seen: Seen) -> None:
    assert (seen.job.status, seen.job.stage, seen.job.reason) == (Status.COMPLETED, None, None)
    assert seen.job.training_config == {"iterations": 3, "epochs": 5}


def test_all_steps_execute_in_correct_order(seen: Seen) -> None:
    moves = [move.stage_to for move in jobs.list_transitions(seen.db, seen.job.id)]
    wanted = "queued placing staging checking running collecting releasing".split()
    assert moves == [*(Stage(word) for word in wanted), None]


def test_database_updates_happen_in_real_time(seen: Seen) -> None:
    assert seen.iterations_seen[0] <= 1 and seen.iterations_seen[-1] == 3
    assert Status.RUNNING in seen.statuses and seen.statuses[-1] is Status.COMPLETED


def test_outputs_are_downloaded_to_s3(seen: Seen) -> None:
    for row in artifacts.list_artifacts(seen.db, seen.job.id):
        assert seen.store.stat(f"jobs/{seen.job.id}/{row.path}").size_bytes == row.size_bytes


def test_gpu_instance_is_terminated(seen: Seen) -> None:
    released = attempts.list_attempts(seen.db, seen.job.id)[0].released_at
    assert released is not None and seen.job.ended_at is not None and released <= seen.job.ended_at


def test_no_resource_leaks(seen: Seen) -> None:
    assert processes_of(seen.job.id) == []
    with seen.db.read() as conn:
        topics = list(conn.execute(select(tables.outbox.c.topic)).scalars())
    assert topics == ["job.started", "job.completed"]


@pytest.mark.parametrize("call", ["submit", "poll", "read", "list", "release"])
def test_error_handling_at_each_step(tmp_path: Path, call: str) -> None:
    db, target, left = open_database(tmp_path / "t.db"), Scripted(RUNNING, RUNNING, GOOD), [1, 2]

    async def fail(_attempt: str) -> None:
        if left:
            left.pop()
            raise RuntimeError("out of order")

    target.before[call] = fail
    job = settle(db, tmp_path, target, scripted_spec())
    assert (job.status, job.attempts, target.alive, left) == (Status.COMPLETED, 1, set(), [])
    db.close()


def test_can_run_multiple_iterations(seen: Seen) -> None:
    iterations = read_records.list_iterations(seen.db, seen.job.id)
    assert [row.number for row in iterations] == [1, 2, 3]
    epochs = [[row.number for row in read_records.list_epochs(seen.db, iteration.id)] for iteration in iterations]
    assert epochs == [[1, 2, 3, 4, 5]] * 3


# 7.4 Edge cases


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
def test_empty_dataset_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    (tmp_path / "empty.jsonl").touch()
    db = open_database(tmp_path / "t.db")
    train = {"data": {"source": "jsonl", "path": str(tmp_path / "empty.jsonl")}, "steps": 20}
    job = submitting.submit(db, parse_spec({"name": "empty", "train": train, "preflight": {"level": 0}}))
    with driven(db, tmp_path, open_store(tmp_path / "storage")):
        wait(lambda: find(db, job.id).status.final)
    job = find(db, job.id)
    assert (job.status, job.reason, job.attempts) == (Status.FAILED, Reason.BAD_DATA, 1), job.message
    db.close()


def test_invalid_yaml_configuration(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: Bad Name\ncommand: true\nlimits: {attempts: 0}\nunknown: 1\n")
    with pytest.raises(SpecError) as refused:
        yaml_file.load(path).read(parse_spec)
    assert {fault.path.split(":")[-1].strip() for fault in refused.value.faults} and len(refused.value.faults) >= 4


def test_duplicate_job_submission(tmp_path: Path) -> None:
    db, target = open_database(tmp_path / "t.db"), Scripted(GOOD)
    first, new = submitting.submit_once(db, scripted_spec(), key="one", load=target.load)
    second, again = submitting.submit_once(db, scripted_spec(), key="one", load=target.load)
    assert (first.id, new, again) == (second.id, True, False)
    with pytest.raises(KeyTaken):
        submitting.submit_once(db, scripted_spec(attempts=2), key="one", load=target.load)
    assert jobs.count_jobs(db) == 1
    db.close()


def test_cancel_already_completed_job(seen: Seen) -> None:
    with pytest.raises(JobFinal, match="already completed"):
        submitting.cancel(seen.db, seen.job.id)
    assert find(seen.db, seen.job.id) == seen.job


def test_cancel_already_failed_job(tmp_path: Path) -> None:
    db, target = open_database(tmp_path / "t.db"), Scripted()

    async def refuse(_attempt: str) -> None:
        raise TargetError("no")

    target.before["submit"] = refuse
    job = settle(db, tmp_path, target, scripted_spec())
    with pytest.raises(JobFinal, match="already failed"):
        submitting.cancel(db, job.id)
    db.close()


def test_query_non_existent_job(seen: Seen) -> None:
    assert jobs.find_job(seen.db, "nobody") is None
    with pytest.raises(JobMissing):
        submitting.cancel(seen.db, "nobody")


def test_very_long_training_over_24_hours(tmp_path: Path) -> None:
    """Ten days, a look every few hours: nothing runs out, and a look at which nothing is new writes nothing."""
    db, target, late = open_database(tmp_path / "t.db"), Scripted(RUNNING), [timedelta()]
    spec = scripted_spec(stall_minutes=None)
    job = submitting.submit(db, spec, load=target.load)
    plane = Context(
        db=db, home=tmp_path, load=target.load, token=take_over(db), rest_s=at_once,
        storage=open_store(tmp_path / "storage"), now=lambda: datetime.now(UTC) + late[0],
    )  # fmt: skip
    changes = []
    watcher = sqlite3.connect(tmp_path / "t.db")  # of its own: the number does not tell of its own connection's writes

    def written() -> int:
        """Goes up with every commit that changed the file."""
        number: int = watcher.execute("PRAGMA data_version").fetchone()[0]
        return number

    async def main() -> None:
        while find(db, job.id).stage is not Stage.RUNNING:
            await handle_stage(plane, find(db, job.id))
        await handle_stage(plane, find(db, job.id))
        for _ in range(60):
            late[0] += timedelta(hours=4)
            before = written()
            await handle_stage(plane, find(db, job.id))
            changes.append(written() - before)
        target.polls = [GOOD]
        while find(db, job.id).stage is not None:
            await handle_stage(plane, find(db, job.id))

    asyncio.run(main())
    done = find(db, job.id)
    assert done.status is Status.COMPLETED and set(changes) == {0}
    assert done.started_at is not None and done.ended_at is not None
    assert done.ended_at - done.started_at > timedelta(days=9)
    watcher.close()
    db.close()
