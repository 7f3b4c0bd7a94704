"""Checkboxes of seed 004, 5.1, 5.2, 8.1 and 8.2, on a rented machine: one training of 3 × 5 epochs, seen from
all sides.

The instance is one of the simulated cloud, a real SSH server; the storage is a real S3 server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lambda_sim import lambda_cloud, live
from s3_server import S3
from sshd import needs_sshd
from store.rows import count_faults
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.plan import ATTEMPT_VARIABLE, EVENTS_FILE
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.sim.lambda_cloud.simulator import Simulator
from trainmaster.storage import Store, open_store
from trainmaster.store import artifacts, attempts, events, instances, jobs
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.page_rows import iterations
from trainmaster.store.rows import JobRow
from trainmaster.web.app import create_app

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]

ITERATIONS, EPOCHS = 3, 5
OBJECTS = {
    "datasets/tales/train.jsonl": b'{"text": "once"}\n' * 10_000,
    "datasets/tales/eval.jsonl": b'{"text": "upon"}\n',
    "configs/tales.yaml": b"steps: 3\n",
    "scripts/train.sh": rb"""#!/bin/sh
say() { printf '{"timestamp":"2026-01-01 10:0%d:%02d","phase":"%s","event":"%s","iteration":%d,"data":%s}\n' \
  $1 $2 $3 $4 $1 "$5" >> global.json; }
for i in 1 2 3; do
  say $i 0 ITERATION start '{}'
  say $i 1 TRAINING start '{}'
  for e in 1 2 3 4 5; do
    say $i $((10 + e)) TRAINING epoch_complete "{\"epoch\":$e,\"avg_loss\":$i.$e}"
    until [ -e gate-$i-$e ]; do sleep 0.02; done
  done
  say $i 30 TRAINING end '{"duration":30}'
  say $i 40 EVAL_MODEL metrics "{\"model_id\":\"m$i\",\"metrics\":{\"loss\":$i}}"
  say $i 50 ITERATION end '{"time_taken":50}'
  sha256sum data/train.jsonl > "$TRAINMASTER_OUTPUTS/model-$i.txt"
done
head -c 3000000 /dev/urandom > "$TRAINMASTER_OUTPUTS/weights.bin"
sha256sum < "$TRAINMASTER_OUTPUTS/weights.bin"
""",
}
INPUTS = {
    "train": "datasets/tales/train.jsonl", "eval": "datasets/tales/eval.jsonl", "config": "configs/tales.yaml",
    "script": "scripts/train.sh",
}  # fmt: skip


@dataclass(kw_only=True)
class Seen:
    """What was seen of the job while it ran, and its end."""

    db: Database
    storage: Store
    cloud: Simulator
    home: Path
    job: JobRow
    instance: dict[str, Any] = field(default_factory=dict)  # while it trained
    files: dict[str, bytes] = field(default_factory=dict)  # in its working folder
    live_epochs: list[int] = field(default_factory=list)  # rows while each epoch waited at its gate


@pytest.fixture(scope="module")
def seen(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch, lambda_cloud(home / "lambda", patch) as cloud:
        s3.use(patch)
        storage = open_store(f"s3://{s3.bucket}/seed-box")
        for path, data in OBJECTS.items():
            storage.put(path, data)
        db = open_database(home / "trainmaster.db")
        spec = {"name": "tales", "target": "lambda", "command": ["./scripts/train.sh"], "inputs": INPUTS}
        job = submitting.submit(db, parse_spec({**spec, "preflight": {"level": 0}}))
        found = Seen(db=db, storage=storage, cloud=cloud, home=home, job=job)
        asyncio.run(watch(found))
        yield found
        db.close()


async def watch(seen: Seen) -> None:
    stop = asyncio.Event()
    loop = asyncio.create_task(reconcile.run(seen.db, seen.home, stop=stop, tick_s=0.05, storage=seen.storage))
    try:
        while not (now := find(seen)).status.final:
            if now.stage == "running" and len(seen.live_epochs) < ITERATIONS * EPOCHS:
                look(seen)
            await asyncio.sleep(0.02)
        seen.job = now
    finally:
        stop.set()
        await loop


def find(seen: Seen) -> JobRow:
    found = jobs.find_job(seen.db, seen.job.id)
    assert found is not None
    return found


def look(seen: Seen) -> None:
    """Open the gate of an epoch once its row is stored: the next one is trained after that."""
    number = len(seen.live_epochs)
    if len(epochs(seen)) <= number:
        return
    seen.instance = live(seen.cloud)[0]
    work = Path(seen.instance["home"]) / ".trainmaster" / "jobs" / seen.job.id / "work"
    if not seen.files:
        seen.files = {
            path.relative_to(work).as_posix(): path.read_bytes() for path in work.rglob("*") if path.is_file()
        }
    seen.live_epochs.append(len(epochs(seen)))
    (work / f"gate-{number // EPOCHS + 1}-{number % EPOCHS + 1}").touch()


def epochs(seen: Seen) -> list[tuple[int, int, float | None]]:
    return [
        (row.number, epoch.number, epoch.avg_loss)
        for row in iterations.list_iterations(seen.db, seen.job.id)
        for epoch in iterations.list_epochs(seen.db, row.id)
    ]


def test_launch_gpu_instance_returns_valid_instance(seen: Seen) -> None:
    (row,) = instances.list_of_attempt(seen.db, f"{seen.job.id}.1")
    assert (row.provider_id, row.nonce) == (seen.instance["id"], seen.instance["name"])
    assert row.address and seen.instance["status"] == "active" and row.launched_at is not None


def test_transfer_training_files_transfers_all_files(seen: Seen) -> None:
    wanted = {f"{folder}/{Path(path).name}": OBJECTS[path] for folder, path in (
        ("data", INPUTS["train"]), ("data", INPUTS["eval"]), ("configs", INPUTS["config"]),
        ("scripts", INPUTS["script"]),
    )}  # fmt: skip
    assert {name: data for name, data in seen.files.items() if name in wanted} == wanted


def test_cleanup_instance_terminates_gpu(seen: Seen) -> None:
    (row,) = instances.list_of_attempt(seen.db, f"{seen.job.id}.1")
    (one,) = seen.cloud.instances()
    assert (row.state, one["status"]) == ("gone", "terminated") and row.gone_at is not None


def test_complete_run_from_start_to_finish(seen: Seen) -> None:
    assert seen.job.status is Status.COMPLETED, (seen.job.reason, seen.job.message)
    stages = [str(move.stage_to) for move in jobs.list_transitions(seen.db, seen.job.id) if move.stage_to]
    order = ["placing", "provisioning", "connecting", "staging", "checking", "running", "collecting", "releasing"]
    assert [stage for stage in stages if stage in order] == order


def test_gpu_instance_is_terminated(seen: Seen) -> None:
    assert live(seen.cloud) == [] and seen.cloud.summary()["not_terminated"] == []
    (attempt,) = attempts.list_attempts(seen.db, seen.job.id)
    assert attempt.released_at is not None


def test_no_resource_leaks(seen: Seen) -> None:
    marked = f"{ATTEMPT_VARIABLE}={seen.job.id}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            assert marked not in entry.read_bytes(), "a process is left"
    assert seen.cloud.instances()[0]["home"] is None or not Path(seen.cloud.instances()[0]["home"]).exists()
    assert not [path for path in seen.home.rglob("*") if path.suffix in (".tmp", ".part")]


def test_monitoring_does_not_lag_behind_training(seen: Seen) -> None:
    """Each epoch waited until its row was stored: the rows never fall behind by an epoch."""
    assert seen.live_epochs == list(range(1, ITERATIONS * EPOCHS + 1))


def test_full_training_job(seen: Seen) -> None:
    wanted = [(i, e, float(f"{i}.{e}")) for i in range(1, ITERATIONS + 1) for e in range(1, EPOCHS + 1)]
    assert sorted(epochs(seen)) == wanted
    assert [row.time_taken for row in iterations.list_iterations(seen.db, seen.job.id)] == [50.0] * ITERATIONS
    assert len(iterations.list_evals(seen.db, job_id=seen.job.id)) == ITERATIONS


def test_database_stays_consistent(seen: Seen) -> None:
    """Rows lie end to end over the whole stored file: none is missing, none is there twice."""
    content = seen.storage.get(f"jobs/{seen.job.id}/attempts/1/{EVENTS_FILE}")
    rows, at = events.list_events(seen.db, seen.job.id, limit=10_000), 0
    for row in rows:
        assert row.offset == at
        at += row.length
    assert at == len(content) and count_faults(seen.db, seen.job.id) == 0


def test_all_outputs_downloaded_correctly(seen: Seen) -> None:
    kept = {row.path: row for row in artifacts.list_artifacts(seen.db, seen.job.id)}
    assert {f"outputs/model-{i}.txt" for i in (1, 2, 3)} | {"outputs/weights.bin", "attempts/1/rank-0.log"} <= set(kept)
    for path, row in kept.items():
        stored = seen.storage.get(f"jobs/{seen.job.id}/{path}")
        assert (len(stored), hashlib.sha256(stored).hexdigest()) == (row.size_bytes, row.sha256)
    printed = seen.storage.get(f"jobs/{seen.job.id}/attempts/1/rank-0.log").split()[0].decode()
    assert printed == kept["outputs/weights.bin"].sha256, "as the machine computed it"


def test_database_query_performance(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    """Under 100 ms each, in time of the processor: a busy machine does not count."""
    queries = {
        "status": lambda: jobs.find_job(seen.db, seen.job.id),
        "list": lambda: jobs.list_jobs(seen.db, limit=50),
        "events": lambda: events.list_events(seen.db, seen.job.id, limit=100),
        "iterations": lambda: iterations.list_iterations(seen.db, seen.job.id),
        "evaluations": lambda: iterations.list_evals(seen.db, job_id=seen.job.id),
    }
    took_ms = {name: _cpu_ms(query) for name, query in queries.items()}
    with capsys.disabled():
        print("\nqueries, ms of the processor: " + ", ".join(f"{name} {ms:.1f}" for name, ms in took_ms.items()))
    assert max(took_ms.values()) < 100


def test_api_response_times(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    """Under 500 ms each, in time of the processor, request and response together."""
    app = create_app(seen.db, seen.home, reconcile=False, storage=seen.storage)
    with TestClient(app, base_url="http://127.0.0.1:8470", client=("127.0.0.1", 50_000)) as client:
        paths = ("", f"/{seen.job.id}", f"/{seen.job.id}/details", f"/{seen.job.id}/events")
        asked = {path: (lambda path=path: client.get(f"/v1/training/jobs{path}").raise_for_status()) for path in paths}
        took_ms = {path: _cpu_ms(get) for path, get in asked.items()}
    with capsys.disabled():
        print(f"\nAPI, ms of the processor: {max(took_ms.values()):.1f} at most")
    assert max(took_ms.values()) < 500


def _cpu_ms(work: Any) -> float:
    """The best of five: the first one compiles."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        assert work() is not None
        best = min(best, (time.process_time() - began) * 1000)
    return best
