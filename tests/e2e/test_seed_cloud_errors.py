"""Checkboxes of seed 004, 7.1 and 7.3, on rented instances: no capacity, and nothing left behind by a failed job."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lambda_sim import drive, lambda_cloud, live, submit
from sshd import needs_sshd
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.plan import ATTEMPT_VARIABLE
from trainmaster.core.states import Reason, Status
from trainmaster.sim.lambda_cloud.simulator import Simulator
from trainmaster.store import attempts, instances
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(180)]

SCRIPT = 'sleep 600 & echo $! > "$TRAINMASTER_OUTPUTS/pid"; sleep 1; exit 3'


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    with lambda_cloud(tmp_path / "lambda", monkeypatch, capacity=1) as simulator:
        yield simulator


def fail(db: Database, home: Path) -> JobRow:
    (ended,) = drive(db, home, submit(db, SCRIPT))
    return ended


def of_attempt(job: JobRow) -> list[str]:
    """Processes with the mark of an attempt of the job."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{ATTEMPT_VARIABLE}={job.id}".encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_no_gpu_instances_available(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    holder = submit(db, "echo up; sleep 600", rent={"types": ["gpu_2x_h100_sxm5"]})
    drive(db, tmp_path, holder, until=lambda: _stage(db, holder) == "running")
    waiting = submit(db, "true", rent={"types": ["gpu_2x_h100_sxm5"], "wait_minutes": 0.02})
    (ended,) = drive(db, tmp_path, waiting)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.NO_CAPACITY), ended.message
    assert "gpu_2x_h100_sxm5" in ended.message and "sold out" in ended.message
    assert [row.provider_id for row in instances.list_of_attempt(db, f"{waiting.id}.1") if row.provider_id] == []
    submitting.cancel(db, holder.id)
    drive(db, tmp_path, holder)
    assert live(cloud) == []


def _stage(db: Database, job: JobRow) -> str | None:
    now = find_job(db, job.id)
    return now and now.stage


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_gpu_instance_terminated_on_failure(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    job = fail(db, tmp_path)
    (one,) = cloud.instances()
    (row,) = instances.list_of_attempt(db, f"{job.id}.1")
    assert (one["status"], row.state, row.provider_id) == ("terminated", "gone", one["id"])


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_ssh_connections_closed_on_error(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    fail(db, tmp_path)
    ports = {f"{cloud.ssh_port:04X}"}
    with Path("/proc/net/tcp").open() as table:
        rows = [line.split() for line in table.readlines()[1:]]
    inodes = {row[9] for row in rows if row[2].rpartition(":")[2] in ports}
    ours = [entry.readlink() for entry in Path(f"/proc/{os.getpid()}/fd").iterdir() if entry.is_symlink()]
    assert not [link for link in ours if any(f"socket:[{inode}]" == str(link) for inode in inodes)]


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_temporary_files_cleaned_up(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    fail(db, tmp_path)
    assert cloud.instances()[0]["home"] is None or not Path(cloud.instances()[0]["home"]).exists()
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("*.part"))


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_background_tasks_stopped(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    """The control plane ends by itself when it is told to: no task of the job keeps its event loop."""
    fail(db, tmp_path)

    async def stop_at_once() -> list[str]:
        stop = asyncio.Event()
        stop.set()
        await reconcile.run(db, tmp_path, stop=stop)
        return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(stop_at_once()) == []


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_no_orphaned_processes(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    job = fail(db, tmp_path)
    assert of_attempt(job) == [], "the background process of its script is gone too"


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_database_transactions_rolled_back(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    """A change that fails in its middle leaves nothing: neither the machine's row nor the job's."""
    job = submit(db, "true")
    at = job.created_at
    with db.write() as conn:
        attempts.insert_attempt(conn, job.id, 1, handle={}, at=at)
    with pytest.raises(RuntimeError), db.write() as conn:
        instances.insert_intent(
            conn, f"{job.id}.1", target="lambda", nonce="n", kind="k", region="r", cents_per_hour=1.0, at=at
        )
        raise RuntimeError("in the middle")
    assert instances.list_of_attempt(db, f"{job.id}.1") == []


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_job_marked_as_failed(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    job = fail(db, tmp_path)
    assert (job.status, job.reason) == (Status.FAILED, Reason.SCRIPT_FAILED)
    assert "exited with 3" in job.message and job.ended_at is not None
