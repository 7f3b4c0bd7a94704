"""Database, storage or disk are gone for a while: nothing is lost, and the work goes on by itself.

A real PostgreSQL, a real S3 server and a real full disk, under a real job of 3 × 5 epochs. They are gone for a second
or two here; TRAINMASTER_OUTAGE_S=60 makes it a minute (`make outages`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from postgres import Postgres
from s3_server import S3, serve
from trainmaster.control import quotas
from trainmaster.control import submit as submitting
from trainmaster.core.errors import TargetError
from trainmaster.core.events import split
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.storage import Store, open_store
from trainmaster.store import artifacts, events, jobs
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.page_rows import iterations
from trainmaster.store.rows import JobRow

from .drill import workload
from .driving import driven, wait

pytestmark = pytest.mark.both_databases

OUTAGE_S = float(os.environ.get("TRAINMASTER_OUTAGE_S", "1.5"))
ALL = workload.ITERATIONS * workload.EPOCHS
SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(autouse=True)
def _agents_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)


def epochs(db: Database, job: JobRow) -> int:
    return sum(len(iterations.list_epochs(db, row.id)) for row in iterations.list_iterations(db, job.id))


def is_final(db: Database, job: JobRow) -> bool:
    row = jobs.find_job(db, job.id)
    return row is not None and row.status.final


def through(db: Database, home: Path, store: Store, outage: Callable[[Callable[[], None]], None]) -> JobRow:
    """A job that is some epochs on when the outage comes, goes on in it, and ends after it."""
    job = submitting.submit(db, parse_spec(workload.spec()))
    with driven(db, home, store):
        for number in range(4):
            workload.gate(home, job.id, number)
        wait(lambda: epochs(db, job) == 4)

        def go_on() -> None:
            for number in range(4, ALL):
                workload.gate(home, job.id, number)
            time.sleep(OUTAGE_S)

        outage(go_on)
        wait(lambda: is_final(db, job))
    return job


def check(db: Database, home: Path, store: Store, job: JobRow) -> None:
    """One attempt, every line of its file once, every record, and every artifact as it was left."""
    found = jobs.find_job(db, job.id)
    assert found is not None
    assert (found.status, found.attempts, found.message, found.tries) == (Status.COMPLETED, 1, "", 0)
    folder = home / "jobs" / job.id / "attempts" / "1"
    content = (folder / "events.jsonl").read_bytes()
    rows = events.list_events(db, job.id, limit=10_000)
    zone = rows[0].ts.tzinfo if rows[0].ts else None
    assert zone is not None
    lines = split(content, offset=0, zone=zone, last=True)
    assert [(row.offset, row.length) for row in rows] == [(line.offset, line.length) for line in lines]
    assert epochs(db, job) == ALL and len(iterations.list_evals(db, job_id=job.id)) == workload.ITERATIONS
    kept = artifacts.list_artifacts(db, job.id)
    assert {row.path for row in kept} >= {"project.yaml", "attempts/1/events.jsonl", "outputs/model-3/weights.bin"}
    for row in kept:
        stored = store.get(f"jobs/{job.id}/{row.path}")
        assert (len(stored), sha256(stored).hexdigest()) == (row.size_bytes, row.sha256)
    assert store.get(f"jobs/{job.id}/attempts/1/events.jsonl") == content


@pytest.mark.proof
@pytest.mark.alone  # the outage of 1.5 s must be noticed
def test_the_database_is_gone_for_a_while(postgres: Postgres, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The shared server of the tests may lose what it said was committed when it is cut off; a real one may not.
    db = open_database(postgres.create() + "?options=-csynchronous_commit%3Don")
    store = open_store(tmp_path / "storage")

    def outage(go_on: Callable[[], None]) -> None:
        postgres.stop()
        try:
            go_on()
        finally:
            postgres.start()

    job = through(db, tmp_path, store, outage)
    check(db, tmp_path, store, job)
    db.close()
    warnings = [record for record in caplog.records if "could not be read" in record.getMessage()]
    assert warnings, "the outage is in the log"
    # A trace of every round, several in a second, filled the disk of the log in an outage of hours.
    assert not [record for record in caplog.records if record.exc_info or "\n" in record.getMessage().strip()]


@pytest.fixture
def own_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A server that no other test needs."""
    with serve(tmp_path_factory.mktemp("own-s3")) as server:
        yield server


@pytest.mark.proof
def test_the_storage_is_gone_for_a_while(own_s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_s3.use(monkeypatch)
    db = open_database(tmp_path / "trainmaster.db")
    store = open_store(f"s3://{own_s3.bucket}/outage-{tmp_path.name}")
    waited: list[str] = []

    def outage(go_on: Callable[[], None]) -> None:
        assert own_s3.server is not None
        own_s3.server.stop()
        try:
            go_on()
            wait(lambda: bool(job_message(db)))
            waited.append(job_message(db))
        finally:
            own_s3.server.start()

    job = through(db, tmp_path, store, outage)
    assert "no answer" in waited[0], "the job says what it waits for"
    check(db, tmp_path, store, job)
    db.close()


def job_message(db: Database) -> str:
    (job,) = jobs.list_jobs(db)
    return job.message


@pytest.fixture
def small_home(tmp_path: Path) -> Iterator[Path]:
    """A home folder on a disk of its own, of 64 MiB."""
    if os.getuid() != 0:
        pytest.skip("mounts a small file system, which needs root")
    home = tmp_path / "home"
    home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", home], check=False).returncode:
        pytest.skip("this machine lets even root mount nothing")
    try:
        yield home
    finally:
        subprocess.run(["umount", "-l", home], check=True)


def fill(file: Path) -> None:
    """Take every byte that is left on the disk of this file."""
    with contextlib.suppress(OSError), file.open("ab", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * 4096)


def test_the_disk_of_the_home_is_not_filled_with_what_a_job_left(small_home: Path) -> None:
    storage = open_store(small_home / "storage")
    quota = quotas.open_quota(storage, 0)
    quota.take(1 << 36)  # perhaps all of it a hole: only what is written counts here
    fill(small_home / "of-a-job")
    with pytest.raises(TargetError, match="are kept for its database"):
        quota.require_room()


@pytest.mark.proof
def test_jobs_are_submitted_and_cancelled_while_the_disk_of_the_home_is_full(small_home: Path) -> None:
    db = open_database(small_home / "trainmaster.db")
    db.reserve_space()
    spec = parse_spec({"name": "a", "command": ["true"]})
    before = submitting.submit(db, spec)
    fill(small_home / "of-a-job")
    with pytest.raises(OSError, match="No space left"):
        (small_home / "more").write_bytes(b"x" * 4096)
    for _ in range(300):  # more than the log of the database holds at once
        made = submitting.submit(db, spec)
        assert submitting.cancel(db, made.id).cancel_requested
    assert submitting.cancel(db, before.id).cancel_requested
    with db.read() as conn:
        assert conn.exec_driver_sql("PRAGMA quick_check").scalar_one() == "ok"
    db.close()


@pytest.mark.proof
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system, which needs root")
def test_the_disk_is_full_for_a_while(tmp_path: Path) -> None:
    """Of the control plane: its database and its storage. The job's own folder is on another disk, as on a node."""
    home, nodes = tmp_path / "home", tmp_path / "nodes"
    home.mkdir()
    nodes.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", home], check=False).returncode:
        pytest.skip("this machine lets even root mount nothing")
    try:
        (home / "jobs").symlink_to(nodes)
        db, store = open_database(home / "trainmaster.db"), open_store(home / "storage")
        ballast = home / "ballast"

        def outage(go_on: Callable[[], None]) -> None:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            go_on()
            assert epochs(db, jobs.list_jobs(db)[0]) < ALL, "it was not full"
            ballast.unlink()

        job = through(db, home, store, outage)
        check(db, home, store, job)
        db.close()
    finally:
        subprocess.run(["umount", "-l", home], check=True)
