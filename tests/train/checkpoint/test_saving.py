"""Saving: how many are kept, what a failed save does, and that the manifest comes last."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from fork_server import ForkServer
from trainmaster.core.schema import to_plain
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.checkpoint.save import CannotSave
from trainmaster.train.loop import TrainingFailed

from ..runs import RunHere, Start, read_events, tiny


def test_the_newest_are_kept_and_no_more(run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here(tmp_path, tiny(steps=7, eval_sequences=0, checkpoint={"every_steps": 1, "keep": 3}))
    assert ran.checkpoints == ["step-00000005", "step-00000006", "step-00000007"]


def test_a_damaged_one_does_not_count_as_kept(run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here(tmp_path, tiny(steps=4, eval_sequences=0, checkpoint={"every_steps": 2, "keep": 2}))
    (tmp_path / "checkpoints" / "step-00000002" / "__0_0.distcp").unlink()
    assert manifests.prune(tmp_path / "checkpoints", keep=2, newest=4) == []
    assert ran.checkpoints == ["step-00000002", "step-00000004"]
    assert manifests.prune(tmp_path / "checkpoints", keep=1, newest=4) == [2]
    assert ran.checkpoints == ["step-00000004"]


def test_of_a_checkpoint_that_is_a_link_the_link_is_deleted(run_here: RunHere, tmp_path: Path) -> None:
    """Someone moved it to a larger disk; it must not keep every later one from being deleted."""
    folder, moved = tmp_path / "checkpoints", tmp_path / "larger disk"
    run_here(tmp_path, tiny(steps=4, eval_sequences=0, checkpoint={"every_steps": 2, "keep": 2}))
    (folder / "step-00000002").rename(moved)
    (folder / "step-00000002").symlink_to(moved)
    assert manifests.prune(folder, keep=1, newest=4) == [2]
    assert sorted(entry.name for entry in folder.iterdir()) == [".lock", "step-00000004"]
    assert (moved / manifests.MANIFEST).exists()


def test_the_manifest_names_every_file_with_its_size_and_hash(run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here(tmp_path, tiny(steps=3, eval_sequences=0))
    folder = tmp_path / "checkpoints" / "step-00000003"
    listed = ran.manifest(3)["files"]
    assert set(listed) == {entry.name for entry in folder.iterdir()} - {"manifest.json"}
    for name, record in listed.items():
        data = (folder / name).read_bytes()
        assert record == {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (saved,) = ran.named("CHECKPOINT", "saved")
    assert saved["data"]["bytes"] == sum(record["size_bytes"] for record in listed.values())


def test_a_failed_save_is_told_and_training_goes_on(run_here: RunHere, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-00000002.1.tmp").write_text("somebody's file, in the way of the draft folder")
    ran = run_here(tmp_path, tiny(steps=6, eval_sequences=0, checkpoint={"every_steps": 2}))
    (failed,) = ran.named("CHECKPOINT", "failed")
    assert failed["data"]["step"] == 2
    assert "FileExistsError" in failed["data"]["why"]
    assert [item["data"]["step"] for item in ran.named("CHECKPOINT", "saved")] == [4, 6]
    assert ran.named("TRAINING", "end")[0]["data"]["step"] == 6


def block_drafts(folder: Path, *, steps: int, fence: int = 1) -> None:
    """Files in the way of the draft folders of these steps."""
    folder.mkdir(exist_ok=True)
    for step in range(1, steps + 1):
        manifests.draft_of(folder, step, fence=fence).touch()


def test_a_run_whose_end_cannot_be_saved_has_failed(run_here: RunHere, tmp_path: Path) -> None:
    block_drafts(tmp_path / "checkpoints", steps=3)
    with pytest.raises(TrainingFailed, match=r"step 3 could not be saved at the end: rank 0: FileExistsError"):
        run_here(tmp_path, tiny(steps=3, eval_sequences=0, checkpoint={"every_steps": 2}))


@pytest.mark.parametrize("steps_before", [0, 4])
def test_a_run_that_could_save_nothing_does_not_begin(run_here: RunHere, tmp_path: Path, steps_before: int) -> None:
    folder = tmp_path / "checkpoints"
    if steps_before:
        run_here(tmp_path, tiny(steps=steps_before))
        shutil.rmtree(folder / ".lock")
    folder.mkdir(exist_ok=True)
    (folder / ".lock").write_text("as on a disk that is read-only or full: nothing can be created here")
    with pytest.raises(CannotSave, match=r"no checkpoint can be saved in .*checkpoints: rank 0: "):
        run_here(tmp_path, tiny(steps=8, checkpoint={"lease_s": 0.1}))
    ran = [item["data"]["step"] for item in read_events(tmp_path / "events.jsonl") if item["phase"] == "STEP"]
    assert ran == list(range(1, steps_before + 1))


def test_a_resumed_run_makes_room_before_it_saves(run_here: RunHere, tmp_path: Path) -> None:
    """A disk full of old checkpoints, and of the draft of a run that was killed, would take no save that frees it."""
    folder = tmp_path / "checkpoints"
    run_here(tmp_path, tiny(steps=6, eval_sequences=0, checkpoint={"every_steps": 2, "keep": 3}))
    left = manifests.draft_of(folder, 8, fence=1)
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half of a shard")
    block_drafts(folder, steps=8, fence=2)
    with pytest.raises(TrainingFailed):
        run_here(tmp_path, tiny(steps=8, eval_sequences=0, checkpoint={"every_steps": 2, "keep": 1}))
    assert manifests.list_steps(folder) == [6]
    assert not left.exists()


def test_every_rank_fails_when_the_last_save_does(start: Start, tmp_path: Path) -> None:
    block_drafts(tmp_path / "checkpoints", steps=4)
    config = tiny(steps=4, eval_sequences=0, checkpoint={"every_steps": 2, "mode": "async"})
    ran = start(tmp_path, config, ranks=2).finish()
    assert ran.codes == [1, 1], ran.output
    assert ran.named("CHECKPOINT", "failed")[0]["data"]["step"] == 2
    assert list(ran.losses) == [1, 2, 3, 4]
    assert not ran.named("TRAINING", "end")


def test_a_shard_that_cannot_be_written_fails_the_save_alone(programs: ForkServer, tmp_path: Path) -> None:
    """As on a full disk: no file of this run may grow past 200,000 bytes, and its shard needs half a million."""
    code = (
        "import resource, runpy\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "runpy.run_module('trainmaster.train', run_name='__main__', alter_sys=True)\n"
    )
    (tmp_path / "config.json").write_text(
        json.dumps(to_plain(tiny(steps=3, eval_sequences=0, checkpoint={"every_steps": 2})))
    )
    environment = {
        **os.environ,
        "TRAINMASTER_EVENTS": str(tmp_path / "events.jsonl"),
        "TRAINMASTER_CHECKPOINTS": str(tmp_path / "checkpoints"),
    }
    ended = programs.run("-c", code, str(tmp_path / "config.json"), env=environment)
    assert ended.returncode == 1, ended.stderr
    assert "checkpoint of step 2 failed" in ended.stdout
    metrics = [item for item in read_events(tmp_path / "events.jsonl") if item["event"] == "metrics"]
    assert metrics[-1]["data"]["step"] == 3
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == [
        ".lock"
    ]  # what a failed save took is given back


def test_a_commit_replaces_a_rejected_one_and_keeps_its_own(tmp_path: Path) -> None:
    draft = tmp_path / "step-00000003.tmp"
    manifests.begin(draft)
    (draft / "shard").write_bytes(b"new")
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "shard").write_bytes(b"rejected")
    record = manifests.measure(draft / "shard")
    assert record == FileRecord(size_bytes=3, sha256=hashlib.sha256(b"new").hexdigest())
    manifest = Manifest(
        step=3, state={"step": 3}, run={}, files={"shard": record}, ranks=1, torch="2", saved_at="2026-01-01T00:00:00Z"
    )
    path = manifests.commit(draft, manifest)
    assert path == tmp_path / "step-00000003"
    assert manifests.read(path) == manifest
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]
