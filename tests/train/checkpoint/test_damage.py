"""Damaged checkpoints: each kind is found, the run goes down to an older one, and never to a silent step 0."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.errors import CheckpointError
from trainmaster.train.checkpoint import manifest as manifests

from ..runs import RunHere, Start, read_events, tiny

Damage = Callable[[Path], None]


def truncate(checkpoint: Path) -> None:
    shard = checkpoint / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])


def flip_a_bit(checkpoint: Path) -> None:
    shard = checkpoint / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def lose_a_shard(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()


def lose_the_index(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()


def halve_the_manifest(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[: manifest.stat().st_size // 2])


def change_a_number_in_the_manifest(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    text = manifest.read_text()
    assert '"cursor": 48' in text
    manifest.write_text(text.replace('"cursor": 48', '"cursor": 49'))


def rewrite(checkpoint: Path, **changes: Any) -> None:
    """Another manifest, with a digest that fits it: `cursor` and `rollbacks` are of its state."""
    manifest = checkpoint / "manifest.json"
    plain = json.loads(manifest.read_bytes())
    del plain["digest"]
    for name, value in changes.items():
        (plain if name in plain else plain["state"])[name] = value
    manifest.write_text(json.dumps({**plain, "digest": manifests._digest(plain)}))


def come_from_a_later_version(checkpoint: Path) -> None:
    rewrite(checkpoint, v=99)


def go_below_the_first_sample(checkpoint: Path) -> None:
    rewrite(checkpoint, cursor=-8)


def pass_over_samples_below_the_first(checkpoint: Path) -> None:
    rewrite(checkpoint, passed_over=[{"first": -8, "end": 8}])


def have_no_writer(checkpoint: Path) -> None:
    rewrite(checkpoint, ranks=0)


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def become_a_file(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.write_text("")


DAMAGES: dict[Damage, str] = {
    truncate: "__0_0.distcp has",
    flip_a_bit: "__0_0.distcp does not match its SHA-256",
    lose_a_shard: "__0_0.distcp is missing",
    lose_the_index: ".metadata is missing",
    halve_the_manifest: "manifest.json is damaged",
    change_a_number_in_the_manifest: "manifest.json does not match its own digest",
    go_below_the_first_sample: "state.cursor: -8 is out of range; it must be at least 0",
    pass_over_samples_below_the_first: "state.passed_over[0].first: -8 is out of range; it must be at least 0",
    have_no_writer: "manifest.json is damaged: SpecError: ranks: 0 is out of range; it must be at least 1",
    lose_the_manifest: "manifest.json is missing",
    empty: "manifest.json is missing",
    become_a_file: "manifest.json cannot be read",
}
CONFIG = tiny(steps=6, eval_sequences=0, epoch_steps=100, checkpoint={"every_steps": 3, "keep": 2})


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(("damage", "why"), DAMAGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_damaged_newest_is_rejected_and_the_one_before_it_resumed(
    run_here: RunHere, tmp_path: Path, damage: Damage, why: str
) -> None:
    whole = run_here(tmp_path, CONFIG)
    assert whole.checkpoints == ["step-00000003", "step-00000006"]
    unbroken = dict(whole.losses)
    newest = tmp_path / "checkpoints" / "step-00000006"
    damage(newest)
    (tmp_path / "events.jsonl").unlink()
    again = run_here(tmp_path, CONFIG)
    (rejected,) = again.named("CHECKPOINT", "rejected")
    assert rejected["data"]["path"] == str(newest)
    assert why in rejected["data"]["why"]
    assert again.named("TRAINING", "start")[0]["data"]["resumed_from"] == 3
    assert again.losses == {step: unbroken[step] for step in (4, 5, 6)}  # bit-equal
    # The good one has taken the damaged one's place.
    assert again.checkpoints == ["step-00000003", "step-00000006"]
    run_here(tmp_path, CONFIG)
    assert len(again.named("CHECKPOINT", "rejected")) == 1


def test_a_checkpoint_of_a_later_version_is_not_passed_over_and_its_name_not_taken(
    run_here: RunHere, tmp_path: Path
) -> None:
    run_here(tmp_path, CONFIG)
    newest = tmp_path / "checkpoints" / "step-00000006"
    come_from_a_later_version(newest)
    before = (newest / "manifest.json").read_bytes()
    with pytest.raises(
        CheckpointError, match=r"step-00000006.*has version 99.*use the Trainmaster that wrote it, or move"
    ):
        run_here(tmp_path, CONFIG)
    assert (newest / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("damage", [flip_a_bit, lose_the_manifest])
def test_when_none_is_good_nothing_starts(run_here: RunHere, tmp_path: Path, damage: Damage) -> None:
    run_here(tmp_path, CONFIG)
    before = len(read_events(tmp_path / "events.jsonl"))
    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        damage(checkpoint)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* can be trusted"):
        run_here(tmp_path, CONFIG)
    after = read_events(tmp_path / "events.jsonl")[before:]
    assert [item["event"] for item in after if item["phase"] != "START"] == ["rejected", "rejected"]
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2  # they are left for a person to look at


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_two_ranks_refuse_together_with_exit_66(start: Start, run_here: RunHere, tmp_path: Path) -> None:
    run_here(tmp_path, CONFIG)
    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        flip_a_bit(checkpoint)
    ran = start(tmp_path, CONFIG, ranks=2).finish()
    assert ran.codes == [66, 66]
    assert "can be trusted; restore one, or move the folder away" in ran.output[0].splitlines()[-1]
    assert len(ran.named("TRAINING", "start")) == 1  # the first run's


def test_a_save_that_was_cut_off_is_not_a_checkpoint(run_here: RunHere, tmp_path: Path) -> None:
    whole = run_here(tmp_path, CONFIG)
    folder = tmp_path / "checkpoints"
    # What a kill leaves: a draft without manifest, or with one but before its last rename.
    shutil.copytree(folder / "step-00000006", folder / "step-00000009.tmp")
    shutil.copytree(folder / "step-00000006", folder / "step-00000008.tmp")
    lose_the_manifest(folder / "step-00000008.tmp")
    longer = tiny(steps=9, eval_sequences=0, epoch_steps=100, checkpoint={"every_steps": 3, "keep": 2})
    again = run_here(tmp_path, longer)
    assert again.named("TRAINING", "start")[-1]["data"]["resumed_from"] == 6
    assert not again.named("CHECKPOINT", "rejected")
    assert whole.checkpoints == ["step-00000006", "step-00000009"]  # the drafts are swept away


def test_only_cut_off_saves_are_a_fresh_start(run_here: RunHere, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000003.tmp").mkdir(parents=True)
    assert run_here(tmp_path, CONFIG).named("TRAINING", "start")[0]["data"]["resumed_from"] is None


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(run_here: RunHere, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot be read, so it is not known whether it holds checkpoints"):
        run_here(tmp_path, CONFIG)


def test_a_checkpoint_renamed_to_another_step_is_not_taken_for_it(run_here: RunHere, tmp_path: Path) -> None:
    """Taken for the newest it would send every later run back to its step."""
    run_here(tmp_path, tiny(steps=8))
    (tmp_path / "checkpoints" / "step-00000004").rename(tmp_path / "checkpoints" / "step-00000099")
    ran = run_here(tmp_path, tiny(steps=10))
    assert ran.named("TRAINING", "start")[-1]["data"]["resumed_from"] == 8
    assert "it is of step 4, its name of 99" in ran.named("CHECKPOINT", "rejected")[-1]["data"]["why"]
