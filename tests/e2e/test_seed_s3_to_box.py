"""Seed 004, phase 3.1: inputs from S3 to the machine. One test per checkbox, on real S3 and real OpenSSH servers."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from s3_server import S3
from sshd import Lab, lab, needs_sshd
from trainmaster import targets
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.errors import SpecError, Unreachable
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.remote.pull import Object, pull
from trainmaster.storage import Store, open_store
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database
from trainmaster.store.rows import JobRow
from trainmaster.targets.ssh.hosts import SshHost
from trainmaster.targets.ssh.session import session

STEPS = pytest.mark.matrix(one_in=5, of="steps of a rented box", by_file=True)
pytestmark = [STEPS, pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]

OBJECTS = {
    "datasets/tales/train.jsonl": b'{"text": "once"}\n' * 100_000,
    "datasets/tales/eval.jsonl": b'{"text": "upon"}\n',
    "configs/tales.yaml": b"steps: 3\n",
    "scripts/train.sh": b"#!/bin/sh\nwc -c data/train.jsonl data/eval.jsonl configs/tales.yaml\n",
}
INPUTS = {
    "train": "datasets/tales/train.jsonl", "eval": "datasets/tales/eval.jsonl", "config": "configs/tales.yaml",
    "script": "scripts/train.sh",
}  # fmt: skip


class Run:
    """A control plane over S3 and one machine behind sshd."""

    def __init__(self, folder: Path, storage: Store, machine: Lab) -> None:
        self.folder, self.storage, self.machine = folder, storage, machine
        (self.box,) = machine.hosts
        entry = {"host": "127.0.0.1", "name": "box", "port": self.box.port, "key": str(machine.key)}
        document = {"known_hosts": str(machine.known_hosts), "hosts": [{**entry, "python": sys.executable}]}
        (folder / "hosts.yaml").write_text(yaml.safe_dump(document))
        self.db: Database = open_database(folder / "trainmaster.db")

    def job(self, inputs: dict[str, Any]) -> JobRow:
        """Run a job to its end."""
        spec = {"name": "s3", "target": f"ssh:{self.folder / 'hosts.yaml'}", "command": ["./scripts/train.sh"]}
        job = submitting.submit(self.db, parse_spec({**spec, "preflight": {"level": 0}, "inputs": inputs}))
        return asyncio.run(self._drive(job))

    async def _drive(self, job: JobRow) -> JobRow:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconcile.run(self.db, self.folder, stop=stop, tick_s=0.2, storage=self.storage))
        try:
            while (now := find_job(self.db, job.id)) is not None and not now.status.final:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert now is not None
            return now
        finally:
            stop.set()
            await loop

    def work(self, job: JobRow) -> Path:
        return self.box.home / ".trainmaster" / "jobs" / job.id / "work"


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@pytest.fixture(scope="module")
def runs(s3: S3, patch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    s3.use(patch)
    storage = open_store(f"s3://{s3.bucket}/seed-3-1")
    for path, data in OBJECTS.items():
        storage.put(path, data)
    with lab(tmp_path_factory.mktemp("lab")) as machine:
        machine.start("box")
        machine.wait()
        made = Run(tmp_path_factory.mktemp("home"), storage, machine)
        yield made
        made.db.close()


@pytest.fixture(scope="module")
def done(runs: Run) -> JobRow:
    """One job with all four inputs."""
    sha256 = hashlib.sha256(OBJECTS["datasets/tales/train.jsonl"]).hexdigest()
    job = runs.job({**INPUTS, "sha256": {"train": sha256}})
    assert job.status is Status.COMPLETED, (job.reason, job.message)
    return job


def test_can_transfer_train_dataset_from_s3_to_gpu(runs: Run, done: JobRow) -> None:
    assert (runs.work(done) / "data" / "train.jsonl").read_bytes() == OBJECTS["datasets/tales/train.jsonl"]


def test_can_transfer_eval_dataset_from_s3_to_gpu(runs: Run, done: JobRow) -> None:
    assert (runs.work(done) / "data" / "eval.jsonl").read_bytes() == OBJECTS["datasets/tales/eval.jsonl"]


def test_can_transfer_config_yaml_from_s3_to_gpu(runs: Run, done: JobRow) -> None:
    assert yaml.safe_load((runs.work(done) / "configs" / "tales.yaml").read_text()) == {"steps": 3}


def test_can_transfer_training_script_to_gpu(runs: Run, done: JobRow) -> None:
    script = runs.work(done) / "scripts" / "train.sh"
    assert script.read_bytes() == OBJECTS["scripts/train.sh"] and script.stat().st_mode & 0o777 == 0o755


def test_all_files_land_in_correct_directories(runs: Run, done: JobRow) -> None:
    files = sorted(
        path.relative_to(runs.work(done)).as_posix() for path in runs.work(done).rglob("*") if path.is_file()
    )
    assert files == ["configs/tales.yaml", "data/eval.jsonl", "data/train.jsonl", "scripts/train.sh"]
    log = runs.storage.get(f"jobs/{done.id}/attempts/1/rank-0.log").decode()
    assert log.split()[0] == str(len(OBJECTS["datasets/tales/train.jsonl"]))  # the program found them there


def test_can_verify_files_exist_on_gpu_server(runs: Run, done: JobRow) -> None:
    async def go() -> tuple[Any, Any]:
        host = SshHost(
            host="127.0.0.1", name="box", port=runs.box.port, key=str(runs.machine.key), python=sys.executable
        )
        node = session(host, runs.machine.known_hosts.read_bytes())
        try:
            there = await node.request("exists", path=str(runs.work(done) / "data" / "train.jsonl"))
            missing = await node.request("exists", path=str(runs.work(done) / "data" / "none"))
        finally:
            await targets.close()
        return there.result, missing.result

    there, missing = asyncio.run(go())
    assert there == {"kind": "file", "size_bytes": len(OBJECTS["datasets/tales/train.jsonl"])}
    assert missing["kind"] is None


def test_handles_missing_s3_files(runs: Run) -> None:
    job = runs.job({**INPUTS, "eval": "datasets/none.jsonl"})
    assert (job.status, job.reason) == (Status.FAILED, Reason.BAD_DATA)
    assert "there is no s3://" in job.message and job.message.endswith("datasets/none.jsonl")
    assert not runs.work(job).exists()


def test_cleanup_temporary_files(runs: Run, done: JobRow) -> None:
    folders = [runs.work(done).parent, runs.folder]
    names = [path.name for folder in folders for path in folder.rglob("*")]
    assert [name for name in names if name.endswith(".part") or name.startswith(".trainmaster-")] == []
    for folder in folders:  # a signed address is written nowhere
        assert not [path for path in folder.rglob("*") if path.is_file() and b"X-Amz-Signature" in path.read_bytes()]


def test_another_checksum_is_refused_and_leaves_nothing(runs: Run) -> None:
    job = runs.job({**INPUTS, "sha256": {"eval": "0" * 64}})
    assert (job.status, job.reason) == (Status.FAILED, Reason.TARGET_ERROR)
    assert "datasets/tales/eval.jsonl has another sha256" in job.message
    assert not list(runs.work(job).rglob("*eval*"))


def test_inputs_of_other_jobs_and_buckets_are_refused(runs: Run, done: JobRow, patch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"inputs\.train: this belongs to a job"):
        runs.job({"train": f"jobs/{done.id}/attempts/1/rank-0.log"})
    url = {"train": f"{runs.storage.url}/datasets/tales/train.jsonl"}
    refused = runs.job({**INPUTS, **url})
    assert refused.status is Status.FAILED and "TRAINMASTER_INPUTS" in refused.message
    patch.setenv("TRAINMASTER_INPUTS", f"{runs.storage.url}/datasets")
    allowed = runs.job({**INPUTS, **url})
    assert allowed.status is Status.COMPLETED, allowed.message
    same = runs.job({**INPUTS, "eval": INPUTS["train"]})
    assert same.status is Status.FAILED and "have the same file name" in same.message


def test_a_pull_that_is_cut_goes_on_where_it_stopped(runs: Run, tmp_path: Path) -> None:
    path, data = "datasets/tales/train.jsonl", OBJECTS["datasets/tales/train.jsonl"]
    facts = runs.storage.stat(path)
    url = runs.storage.sign(path, expires_s=600)
    wanted = Object(
        name=path, url=url, place=str(tmp_path / "train.jsonl"), size_bytes=len(data), version=facts.version,
        md5=hashlib.md5(data, usedforsecurity=False).hexdigest(), sha256=None, mode=0o644,
    )  # fmt: skip
    key = hashlib.sha256(f"{facts.version} ".encode()).hexdigest()[:16]  # of no machine
    (tmp_path / f".train.jsonl.{key}.part").write_bytes(data[:700_000])
    assert pull(wanted) is True
    assert (tmp_path / "train.jsonl").read_bytes() == data and len(list(tmp_path.iterdir())) == 1
    assert pull(wanted) is False
    away = Object(
        name="x", url="http://127.0.0.1:9/x?secret", place=str(tmp_path / "x"), size_bytes=5, version="v", md5=None,
        sha256=None, mode=0o644,
    )  # fmt: skip
    with pytest.raises(Unreachable) as raised:
        pull(away)
    assert "secret" not in str(raised.value)
