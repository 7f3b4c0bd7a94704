"""What a job leaves is in storage before it is released: whole, once, and also after storage was away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from trainmaster.control import submit as submitting
from trainmaster.control.context import Context
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.core.errors import StorageUnreachable
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.storage.folder import FolderStore
from trainmaster.store import artifacts, jobs
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow

from .scripted import GOOD, RUNNING, Scripted, at_once, ended, take_over

BIG = bytes(range(256)) * 40_000  # several pieces


class Counting(FolderStore):
    """A real folder store that remembers what was put, and can be away."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.puts: list[str] = []
        self.away = False

    def put(self, path: str, data: bytes | Path | Iterator[bytes]) -> None:
        if self.away:
            raise StorageUnreachable("nobody there")
        super().put(path, data)
        self.puts.append(path.partition("/")[2].partition("/")[2])


def begin(db: Database, home: Path, target: Scripted, *, attempts: int = 1) -> tuple[Context, Counting, str]:
    mapping = {"name": "a", "target": "scripted", "command": ["true"], "limits": {"attempts": attempts}}
    job = submitting.submit(db, parse_spec(mapping), load=target.load)
    store = Counting(home / "kept")
    plane = Context(db=db, home=home, load=target.load, token=take_over(db), rest_s=at_once, storage=store)
    return plane, store, job.id


def walk(plane: Context, job_id: str, stage: Stage | None) -> JobRow:
    async def walk() -> JobRow:
        while (job := jobs.find_job(plane.db, job_id)) is not None and job.stage is not stage:
            await handle_stage(plane, job)
        assert job is not None
        return job

    return asyncio.run(walk())


def test_everything_an_attempt_left_is_kept_once_with_its_checksum(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, RUNNING, GOOD)
    target.outputs = {"outputs/a/model.bin": BIG, "outputs/empty": b"", "rank-0.log": b"hello\n", "exit.json": b"{}"}
    plane, store, job_id = begin(db, tmp_path, target)
    walk(plane, job_id, Stage.RELEASING)
    kept = {row.path: row for row in artifacts.list_artifacts(db, job_id)}
    assert {path: row.kind for path, row in kept.items()} == {
        "project.yaml": "project",
        "attempts/1/events.jsonl": "events",
        "attempts/1/rank-0.log": "log",
        "attempts/1/exit.json": "report",
        "outputs/a/model.bin": "output",
        "outputs/empty": "output",
    }
    model = kept["outputs/a/model.bin"]
    assert (model.size_bytes, model.sha256) == (len(BIG), sha256(BIG).hexdigest())
    assert store.get(f"jobs/{job_id}/outputs/a/model.bin") == BIG
    assert walk(plane, job_id, None).status is Status.COMPLETED
    assert sorted(store.puts) == sorted(kept), "each file is stored once"


def test_nothing_starts_before_its_project_file_is_stored(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, GOOD)
    plane, store, job_id = begin(db, tmp_path, target)
    walk(plane, job_id, Stage.STAGING)
    store.away = True
    job = jobs.find_job(db, job_id)
    assert job is not None
    with pytest.raises(StorageUnreachable):
        asyncio.run(handle_stage(plane, job))
    assert target.started == []
    store.away = False
    walk(plane, job_id, Stage.CHECKING)
    assert store.puts == ["project.yaml"] and len(target.started) == 1


def test_a_storage_that_is_away_holds_the_release_up_and_loses_nothing(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, RUNNING, GOOD)
    target.outputs = {"outputs/model.bin": BIG}
    plane, store, job_id = begin(db, tmp_path, target)
    walk(plane, job_id, Stage.COLLECTING)
    store.away = True
    for _ in range(3):
        with pytest.raises(StorageUnreachable):
            walk(plane, job_id, None)
    assert target.made("release") == 0, "what is not kept yet may live on the machine alone"
    store.away = False
    assert walk(plane, job_id, None).status is Status.COMPLETED
    assert store.puts.count("outputs/model.bin") == 1 and store.get(f"jobs/{job_id}/outputs/model.bin") == BIG


def test_what_a_lost_attempt_wrote_until_its_release_is_kept_too(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, RUNNING, ended(TargetState.LOST))
    target.outputs = {"outputs/model.bin": b"before"}

    async def write_on(_attempt: str) -> None:
        target.outputs = {"outputs/model.bin": b"after!"}  # as long as it was: its size does not tell
        target.events += b'{"phase":"STEP","event":"metrics"}\n'

    target.before["release"] = write_on
    plane, store, job_id = begin(db, tmp_path, target)
    assert walk(plane, job_id, None).reason is Reason.NODE_LOST
    assert store.get(f"jobs/{job_id}/outputs/model.bin") == b"after!"
    assert store.get(f"jobs/{job_id}/attempts/1/events.jsonl") == target.events
    kept = {row.path: row.sha256 for row in artifacts.list_artifacts(db, job_id)}
    assert kept["outputs/model.bin"] == sha256(b"after!").hexdigest()


def test_of_two_attempts_the_outputs_of_the_last_are_kept(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, RUNNING, ended(TargetState.FAILED, Reason.PREEMPTED))
    target.outputs = {"outputs/model.bin": b"one", "rank-0.log": b"1"}

    async def second(attempt: str) -> None:
        if attempt.endswith(".2"):
            target.outputs, target.polls = {"outputs/model.bin": b"two", "rank-0.log": b"2"}, [RUNNING, GOOD]

    target.before["submit"] = second
    plane, store, job_id = begin(db, tmp_path, target, attempts=2)
    assert walk(plane, job_id, None).status is Status.COMPLETED
    contents = {row.path: store.get(f"jobs/{job_id}/{row.path}") for row in artifacts.list_artifacts(db, job_id)}
    assert contents["outputs/model.bin"] == b"two"
    assert (contents["attempts/1/rank-0.log"], contents["attempts/2/rank-0.log"]) == (b"1", b"2")


def test_copies_never_take_the_threads_that_their_own_reads_need(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, RUNNING, GOOD)
    target.outputs = {f"outputs/{number}": BIG for number in range(3)}

    async def read_in_thread(_attempt: str) -> None:
        await asyncio.to_thread(lambda: None)  # as targets do that read files

    target.before["read"] = read_in_thread
    plane, store, job_id = begin(db, tmp_path, target)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        while (job := jobs.find_job(db, job_id)) is not None and job.stage is not None:
            await handle_stage(plane, job)

    asyncio.run(main())
    assert sum(path.startswith("outputs/") for path in store.puts) == 3
