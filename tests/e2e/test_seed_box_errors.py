"""Checkboxes of seed 004, 5.1, 7.1 and 7.2, on rented SSH machines: errors with their reasons, and nothing left.

All jobs fail side by side under one control plane, each on a machine of its own; a test looks at its job alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from postgres import Postgres
from s3_server import S3, serve
from sshd import Lab, Sshd, free_port, lab, needs_sshd
from store.rows import count_faults
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.control.deadlines import Deadlines
from trainmaster.core.plan import ATTEMPT_VARIABLE
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.storage import Store, open_store
from trainmaster.store import attempts, events, instances
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database
from trainmaster.store.page_rows import iterations
from trainmaster.store.rows import JobRow

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]

LARGE = 96 << 20  # bytes of an input: long enough to be cut in its middle
_ONCE = {"attempts": 1, "retry": {"bad_machine": False}}
EPOCH = (
    '{"timestamp":"2026-01-01 10:00:00","phase":"TRAINING","event":"epoch_complete","data":{"epoch":1,"avg_loss":2.5}}'
)
CASES: Mapping[str, Mapping[str, Any]] = {
    "credentials": {"script": "true", "rent": {"boot_minutes": 0.02}, "limits": _ONCE},
    "timeout": {"script": "true", "rent": {"boot_minutes": 0.02}, "limits": _ONCE},
    "late": {"script": "true"},
    "transfer": {
        "script": "true",
        "inputs": {"train": "datasets/large.bin"},
        "limits": {"attempts": 1, "retry": {"node_lost": False}},  # the pool has no other machine
    },
    "download": {"script": "true", "inputs": {"train": "datasets/none.bin"}},
    "script": {"script": "echo 'ValueError: no such column'; exit 3"},
    "malformed": {"script": f"echo '{{broken' > global.json; echo '{EPOCH}' >> global.json; echo '[1,' >> global.json"},
    "missing": {"script": "echo trained without events"},
    "too-long": {"script": "sleep 600 & sleep 600", "limits": {"timeout_s": 1.0, "grace_s": 1.0}},
    "memory": {
        "script": "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.10 GiB of which 1.00 GiB is free.'; exit 1"
    },
}


@dataclass(kw_only=True)
class Boxes:
    """Machines behind OpenSSH servers, each in a pool of its own, and a control plane."""

    home: Path
    machines: Lab
    db: Database
    storage: Store

    def start(self, name: str, *, key: Path | None = None) -> Sshd:
        """A machine; `key` is the one to log in with."""
        box = self.machines.start(name, own_key=True, known=False)
        self.write_pool(name, box.port, key=key)
        return box

    def write_pool(self, name: str, port: int, *, key: Path | None = None) -> None:
        access = {"key": str(key or self.machines.key), "python": sys.executable, "lost_after_s": 2.0}
        hosts = [{"host": "127.0.0.1", "port": port, "gpus": 1}]
        self.pool(name).write_text(yaml.safe_dump({"access": access, "hosts": hosts}))

    def pool(self, name: str) -> Path:
        return self.home / f"{name}.yaml"

    def box(self, name: str) -> Sshd:
        return next(box for box in self.machines.hosts if box.name == name)

    def submit(self, name: str, script: str, **spec: Any) -> JobRow:
        document = {"name": name, "target": f"pool:{self.pool(name)}", "command": ["sh", "-c", script]}
        return submitting.submit(self.db, parse_spec({**document, "preflight": {"level": 0}, **spec}))

    @contextlib.asynccontextmanager
    async def driven(self) -> AsyncIterator[None]:
        stop, short = asyncio.Event(), Deadlines(staging_s=60.0, collecting_s=2.0, tries=2)
        run = reconcile.run(self.db, self.home, stop=stop, tick_s=0.05, storage=self.storage, deadlines=short)
        loop = asyncio.create_task(run)
        try:
            yield
        finally:
            stop.set()
            await loop

    async def end(self, jobs: Mapping[str, JobRow], also: Callable[[], None] = lambda: None) -> dict[str, JobRow]:
        while True:
            now = {name: found for name, job in jobs.items() if (found := find_job(self.db, job.id)) is not None}
            if all(job.status.final for job in now.values()):
                return now
            also()
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def boxes(make: pytest.TempPathFactory, db: Database, storage: Store | None = None) -> Iterator[Boxes]:
    home = make.mktemp("home")
    with lab(make.mktemp("lab")) as machines:
        yield Boxes(home=home, machines=machines, db=db, storage=storage or open_store(home / "storage"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    db = open_database(tmp_path_factory.mktemp("db") / "trainmaster.db")
    with boxes(tmp_path_factory, db) as found:
        yield found
    db.close()


@pytest.fixture(scope="module")
def ended(made: Boxes) -> dict[str, JobRow]:
    """Every case at its end."""
    stranger = made.home / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    late_port = free_port()
    made.write_pool("late", late_port)
    for name in CASES.keys() - {"late"}:
        made.start(name, key=stranger if name == "credentials" else None)
    made.machines.wait()
    made.box("timeout").stop()
    made.storage.put("datasets/large.bin", os.urandom(LARGE))
    jobs = {name: made.submit(name, **case) for name, case in CASES.items()}
    cut: list[str] = []
    refused: list[str] = []

    def start_late() -> None:
        """Start the server once a login has failed."""
        now = find_job(made.db, jobs["late"].id)
        if not refused and now is not None and now.tries:
            refused.append(now.message)
            made.machines.start("late", own_key=True, known=False, port=late_port)

    def cut_in_the_middle() -> None:
        """Switch the machine off once a part of the file is there."""
        box = made.box("transfer")
        if not cut and any(path.stat().st_size > 1 << 20 for path in (box.home / ".trainmaster").rglob("*large*")):
            box.cut(also_server=True)
            cut.append(box.name)

    def strike() -> None:
        cut_in_the_middle()
        start_late()

    async def go() -> dict[str, JobRow]:
        async with made.driven():
            return await made.end(jobs, strike)

    found = asyncio.run(go())
    assert cut == ["transfer"] and "nothing listens" in refused[0]
    return found


def assert_clean(made: Boxes, job: JobRow) -> None:
    """The machine is returned, its row gone, connections closed, no process and no draft left."""
    name = job.name
    state = made.pool(name).with_name(f"{name}.yaml.rented")
    assert not state.exists() or json.loads(state.read_text()) == {}, "the machine is returned"
    for attempt in attempts.list_attempts(made.db, job.id):
        assert attempt.released_at is not None
        assert {row.state for row in instances.list_of_attempt(made.db, attempt.id)} <= {"gone"}
    assert name == "timeout" or made.box(name).connections() == []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            assert f"{ATTEMPT_VARIABLE}={job.id}".encode() not in entry.read_bytes(), "a process is left"
    assert not [path for path in made.home.rglob("*") if path.suffix in (".tmp", ".part")]


def assert_failed(made: Boxes, job: JobRow, reason: Reason, *words: str) -> None:
    assert (job.status, job.reason) == (Status.FAILED, reason), job.message
    assert all(word in job.message for word in words), job.message
    assert job.ended_at is not None
    assert_clean(made, job)


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_setup_ssh_connection_with_retry_logic(made: Boxes, ended: dict[str, JobRow]) -> None:
    """The first login found no server (see `ended`); a later one did."""
    job = ended["late"]
    assert (job.status, job.attempts) == (Status.COMPLETED, 1), (job.reason, job.message)
    assert_clean(made, job)


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_ssh_connection_fails_wrong_credentials(made: Boxes, ended: dict[str, JobRow]) -> None:
    assert_failed(made, ended["credentials"], Reason.BAD_MACHINE, "no SSH login within", "it refuses user")


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_ssh_connection_timeout(made: Boxes, ended: dict[str, JobRow]) -> None:
    assert_failed(made, ended["timeout"], Reason.BAD_MACHINE, "no SSH login within")


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_file_transfer_fails_network_issue(made: Boxes, ended: dict[str, JobRow]) -> None:
    assert_failed(made, ended["transfer"], Reason.NODE_LOST, "nothing listens")


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_s3_download_fails(made: Boxes, ended: dict[str, JobRow]) -> None:
    assert_failed(made, ended["download"], Reason.BAD_DATA, "datasets/none.bin")


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_training_script_fails(made: Boxes, ended: dict[str, JobRow]) -> None:
    assert_failed(made, ended["script"], Reason.SCRIPT_FAILED, "no such column")


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_global_json_is_malformed(made: Boxes, ended: dict[str, JobRow]) -> None:
    job = ended["malformed"]
    assert job.status is Status.COMPLETED, (job.reason, job.message)
    assert count_faults(made.db, job.id) == 2, "both broken lines are kept and shown"
    (iteration,) = iterations.list_iterations(made.db, job.id)
    assert [epoch.avg_loss for epoch in iterations.list_epochs(made.db, iteration.id)] == [2.5], "the good line counts"
    assert_clean(made, job)


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_global_json_missing(made: Boxes, ended: dict[str, JobRow]) -> None:
    """A program need not write one: its job completes, with the agent's own events and no records of training."""
    job = ended["missing"]
    assert job.status is Status.COMPLETED, (job.reason, job.message)
    assert iterations.list_iterations(made.db, job.id) == [] and count_faults(made.db, job.id) == 0
    assert [row.event for row in events.list_events(made.db, job.id, phase="PROJECT")] == ["start", "end"]
    assert_clean(made, job)


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_training_timeout(made: Boxes, ended: dict[str, JobRow]) -> None:
    assert_failed(made, ended["too-long"], Reason.TIMED_OUT)


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_out_of_memory_on_gpu(made: Boxes, ended: dict[str, JobRow]) -> None:
    assert_failed(made, ended["memory"], Reason.OUT_OF_MEMORY)


@pytest.fixture
def own_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A server that can be stopped: no other test needs it."""
    with serve(tmp_path_factory.mktemp("own-s3")) as server:
        yield server


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_s3_upload_fails(
    own_s3: S3, db: Database, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is returned although its outputs could not be stored, and the job names them."""
    own_s3.use(monkeypatch)
    with boxes(tmp_path_factory, db, open_store(f"s3://{own_s3.bucket}/upload")) as made:
        box = made.start("upload")
        made.machines.wait()
        job = made.submit("upload", 'echo 7 > "$TRAINMASTER_OUTPUTS/x"; until [ -e go ]; do sleep 0.05; done')

        def stop_storage() -> None:
            now = find_job(db, job.id)
            if now is not None and now.stage is Stage.RUNNING and own_s3.server is not None:
                own_s3.server.stop()
                with contextlib.suppress(FileNotFoundError):  # not made yet, or given back already
                    (box.home / ".trainmaster" / "jobs" / job.id / "work" / "go").touch()

        async def go() -> dict[str, JobRow]:
            async with made.driven():
                return await made.end({"upload": job}, stop_storage)

        found = asyncio.run(go())["upload"]
        assert "could not be" in found.message and "no answer" in found.message, found.message
        assert found.status.final
        assert_clean(made, found)


@pytest.mark.matrix(one_in=7, of="errors of a box and of the cloud")
def test_database_connection_lost(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> None:
    """PostgreSQL is away while the job goes on; afterwards every row is there once, and the machine is returned."""
    db = open_database(postgres.create() + "?options=-csynchronous_commit%3Don")
    with boxes(tmp_path_factory, db) as made:
        box = made.start("database")
        made.machines.wait()
        line = '{"v":1,"phase":"STEP","event":"metrics","data":{"step":%d}}'
        write = f"printf '{line}\\n' $n >> $TRAINMASTER_EVENTS"
        script = f"n=1; {write}; until [ -e go ]; do sleep 0.05; done; for n in 2 3 4; do {write}; done"
        job = made.submit("database", script)

        async def go() -> dict[str, JobRow]:
            async with made.driven():
                while not events.list_events(db, job.id, phase="STEP"):  # noqa: ASYNC110 (rows have no event)
                    await asyncio.sleep(0.05)
                await asyncio.to_thread(postgres.stop)
                try:
                    (box.home / ".trainmaster" / "jobs" / job.id / "work" / "go").touch()
                    await asyncio.sleep(1.0)
                finally:
                    await asyncio.to_thread(postgres.start)
                return await made.end({"database": job})

        found = asyncio.run(go())["database"]
        assert found.status is Status.COMPLETED, (found.reason, found.message)
        assert [row.data["step"] for row in events.list_events(db, job.id, phase="STEP")] == [1, 2, 3, 4]
        assert_clean(made, found)
    db.close()
