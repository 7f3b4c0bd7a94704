"""Two runs in one place of checkpoints: one writes, the other is refused, or stops once it has lost the lock."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer
from s3_server import S3
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import CheckpointError
from trainmaster.storage import Store, open_store
from trainmaster.train.checkpoint import lock as locks
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.lock import Lock, LockHeld, LockLost

from ..runs import Ranks, Start, tiny

LEASE_S = 1.0
STOPS_S = 30.0  # a run that lost its lock stops at its next save; one that did not would run 100,000 steps


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "place")
    s3: S3 = request.getfixturevalue("s3")
    s3.use(monkeypatch)
    return open_store(f"s3://{s3.bucket}/lock-{uuid.uuid4().hex}")


def elsewhere(lock: Lock) -> Lock:
    """The same lock as a process of another machine would hold it: nobody here can see whether it lives."""
    owner = replace(lock._mine.owner, machine="another machine", host="far")
    lock._mine = replace(lock._mine, owner=owner)
    return lock


def test_a_lock_whose_owner_lives_is_refused_and_one_that_is_released_is_taken(store: Store) -> None:
    first = elsewhere(Lock(store, lease_s=LEASE_S))
    assert first.claim() == 1
    with pytest.raises(LockHeld, match=r"is in use by process .* on far"):
        Lock(store, lease_s=LEASE_S).claim()
    first.check()
    first.release()
    assert Lock(store, lease_s=600.0).claim() == 2


def test_a_lock_that_is_not_renewed_is_lost_before_the_next_write(store: Store) -> None:
    first = elsewhere(Lock(store, lease_s=LEASE_S))
    first.claim()
    first._over.set()  # paused: it renews nothing, and does not know it
    second = Lock(store, lease_s=LEASE_S)
    assert second.claim() == 2
    second.check()
    with pytest.raises(LockLost, match=r"was taken over by process .* \(fencing number 1\)"):
        first.check()
    first.release()  # and must not free what is another's
    second.check()


def test_of_runs_that_claim_at_once_one_wins(store: Store) -> None:
    def claim(number: int) -> bool:
        try:
            elsewhere(Lock(store, lease_s=LEASE_S)).claim()
        except LockHeld:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(claim, range(6))) == 1


def test_a_process_of_this_machine_that_has_ended_is_replaced_at_once(store: Store, programs: ForkServer) -> None:
    script = (
        "import os; from trainmaster.storage import open_store; from trainmaster.train.checkpoint.lock import Lock\n"
        f"print(Lock(open_store({store.url!r}), lease_s=600).claim(), flush=True); os._exit(9)"
    )
    run = programs.run("-c", script, env=os.environ)
    assert run.stdout == "1\n", run.stderr
    assert Lock(store, lease_s=600.0).claim() == 2  # a test that waited for the lease would not end


def test_a_place_that_was_removed_under_a_living_run_is_still_its_own(tmp_path: Path) -> None:
    lock = Lock(open_store(tmp_path), lease_s=600.0)
    lock.claim()
    (tmp_path / ".lock" / "00000001.json").unlink()
    lock.check()
    assert json.loads((tmp_path / ".lock" / "00000001.json").read_text())["owner"]["pid"] == os.getpid()
    assert locks._parse(b"{") is None


def test_a_place_that_was_away_for_a_while_is_renewed_again(tmp_path: Path) -> None:
    """A mount that comes back must not look like a run that has stopped renewing."""
    place, away = tmp_path / "place", tmp_path / "away"
    lock = elsewhere(Lock(open_store(place), lease_s=LEASE_S))
    lock.claim()
    place.rename(away)
    time.sleep(LEASE_S)
    away.rename(place)
    with pytest.raises(LockHeld, match="is in use by process"):
        Lock(open_store(place), lease_s=LEASE_S).claim()
    lock.check()
    lock.release()


def config(**checkpoint: Any) -> TrainConfig:
    section = {"every_steps": 2, "keep": 4, "lease_s": LEASE_S, "mode": "async", **checkpoint}
    return tiny(steps=100_000, epoch_steps=100_000, eval_sequences=0, checkpoint=section)


def checkpoints_of(folder: Path) -> list[manifests.Manifest]:
    """Every committed checkpoint, newest first; fails where one is not whole."""
    found = []
    for step in manifests.list_steps(folder):
        path = manifests.path_of(folder, step)
        manifest = manifests.read(path)
        assert manifests.find_fault(path, manifest.files, deep=True) is None, path
        assert sorted(entry.name for entry in path.iterdir()) == sorted([*manifest.files, manifests.MANIFEST])
        found.append(manifest)
    return found


def stop(run: Ranks) -> None:
    (run.folder / "stop").touch()
    assert run.finish().codes == [75]


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_second_run_in_one_folder_is_refused(tmp_path: Path, start: Start) -> None:
    shared = str(tmp_path / "shared")
    # A long lease: on a busy machine a living run may be late to renew a short one.
    first = start(tmp_path / "first", config(folder=shared, lease_s=20.0))
    first.wait_for("CHECKPOINT", "saved", step=2)
    second = start(tmp_path / "second", config(folder=shared, lease_s=20.0)).finish(timeout_s=STOPS_S)
    assert second.codes == [69]
    assert f"{shared} is in use by process {first.processes[0].pid} on " in second.output[0]
    stop(first)
    assert {manifest.fence for manifest in checkpoints_of(Path(shared))} == {1}


@pytest.mark.matrix(one_in=3)
@pytest.mark.alone  # a lease of one second
@pytest.mark.parametrize("pause_s", [0.0, 0.013, 0.037])
def test_a_run_paused_past_its_lease_stops_before_it_writes(tmp_path: Path, start: Start, pause_s: float) -> None:
    shared = tmp_path / "shared"
    first = start(tmp_path / "first", config(folder=str(shared)))
    first.wait_for("CHECKPOINT", "saved")  # no step: a save that is still under way delays the next
    time.sleep(pause_s)  # somewhere in a step or in a save
    first.processes[0].send_signal(signal.SIGSTOP)
    second = start(tmp_path / "second", config(folder=str(shared)))
    second.wait_for("CHECKPOINT", "saved")
    first.processes[0].send_signal(signal.SIGCONT)
    ran = first.finish(timeout_s=STOPS_S)
    assert ran.codes == [69], ran.output
    assert f"was taken over by process {second.processes[0].pid}" in ran.output[0]
    stop(second)
    left = checkpoints_of(shared)
    assert left[0].fence == 2
    assert [manifest.fence for manifest in left] == sorted((m.fence for m in left), reverse=True)


@pytest.mark.proof
@pytest.mark.alone  # a lease of one second
def test_two_runs_that_upload_to_one_store(
    tmp_path: Path, start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.use(monkeypatch)
    url = f"s3://{s3.bucket}/runs-{uuid.uuid4().hex}"
    first = start(tmp_path / "first", config(remote=url))
    first.wait_for("CHECKPOINT", "saved", tier="remote")
    refused = start(tmp_path / "refused", config(remote=url, folder=str(tmp_path / "own"), memory={"use": "off"}))
    assert refused.finish(timeout_s=STOPS_S).codes == [69]
    first.processes[0].send_signal(signal.SIGSTOP)
    second = start(tmp_path / "second", config(remote=url))
    second.wait_for("CHECKPOINT", "saved", tier="remote")
    first.processes[0].send_signal(signal.SIGCONT)
    assert first.finish(timeout_s=STOPS_S).codes == [69]
    stop(second)
    (tmp_path / "third").mkdir()
    third = start(tmp_path / "third", config(remote=url))
    third.wait_for("CHECKPOINT", "loaded")  # downloaded, every byte compared
    third.kill()
    store = open_store(url)
    for item in store.list():
        if item.path.endswith(manifests.MANIFEST):
            manifest = manifests.parse(store.get(item.path))
            assert manifest.objects is not None
            there = {one.path: one.size_bytes for one in store.list(manifest.objects)}
            wanted = {f"{manifest.objects}/{name}": record.size_bytes for name, record in manifest.files.items()}
            assert there == wanted


def test_a_lock_released_while_another_run_waits_for_it_is_taken(store: Store) -> None:
    first = elsewhere(Lock(store, lease_s=600.0))
    first.claim()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(Lock(store, lease_s=20.0).claim)  # looks once a second
        while not second.running():
            time.sleep(0.01)
        time.sleep(0.5)  # long enough that it has seen the first as the owner
        first.release()
        assert second.result() == 2


def test_a_lock_that_cannot_be_created_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("a file where the folder of the lock should be")
    with pytest.raises(CheckpointError, match=r"\.lock/00000001\.json is not there and cannot be created"):
        Lock(open_store(tmp_path), lease_s=LEASE_S).claim()
