"""Going on from a checkpoint: bit-equal on as many ranks, the same curve on any number, nothing read twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.errors import CheckpointError
from trainmaster.train.checkpoint import manifest as manifests

from ..runs import RunHere, Start, StopAfter, read_events, tiny


def test_a_resumed_run_is_bit_equal_to_an_unbroken_one(run_here: RunHere, tmp_path: Path) -> None:
    config = tiny(steps=8, epoch_steps=100)
    unbroken = run_here(tmp_path / "unbroken", config)
    run_here(tmp_path / "broken", config, stop=StopAfter(5))
    broken = run_here(tmp_path / "broken", config)
    assert broken.losses == unbroken.losses  # all eight of them, to the last bit
    assert [item["data"]["step"] for item in broken.named("STEP", "metrics")] == list(range(1, 9))
    assert broken.named("TRAINING", "start")[1]["data"]["resumed_from"] == 5
    (loaded,) = broken.named("CHECKPOINT", "loaded")
    assert loaded["data"]["step"] == 5
    assert broken.named("TRAINING", "end")[-1]["data"]["loss_first"] == unbroken.losses[1]
    (closed,) = broken.named("TRAINING", "epoch_complete")
    assert closed["data"]["avg_loss"] == pytest.approx(sum(unbroken.losses.values()) / 8)


# A learning rate that does not look at the number of steps: a run of 3 steps is then the beginning of one of 6.
FLAT = {"min_lr_ratio": 1.0, "warmup_steps": 1}


def test_two_ranks_then_one_read_each_sample_once_and_in_order(start: Start, run_here: RunHere, tmp_path: Path) -> None:
    unbroken = run_here(tmp_path / "unbroken", tiny(steps=6, optimizer=FLAT))
    first = start(tmp_path / "moved", tiny(steps=3, optimizer=FLAT), ranks=2).finish()
    assert first.codes == [0, 0], first.output
    assert first.manifest(3)["state"]["cursor"] == 3 * 8
    moved = run_here(tmp_path / "moved", tiny(steps=6, optimizer=FLAT))
    assert moved.manifest(6)["state"]["cursor"] == 6 * 8
    # Losses of single batches differ by far more than this between one batch and the next.
    assert moved.losses == pytest.approx(unbroken.losses, abs=1e-4)


def test_the_config_wins_over_the_optimizer_settings_of_the_checkpoint(run_here: RunHere, tmp_path: Path) -> None:
    first = tiny(steps=3, optimizer={**FLAT, "weight_decay": 0.0})
    run_here(tmp_path / "same", first)
    run_here(tmp_path / "other", first)
    same = run_here(tmp_path / "same", tiny(steps=6, optimizer={**FLAT, "weight_decay": 0.0}))
    changed = {"optimizer": {**FLAT, "weight_decay": 50.0}, "checkpoint": {"resume": "changed"}}
    other = run_here(tmp_path / "other", tiny(steps=6, **changed))
    assert same.losses[4] == other.losses[4]
    assert same.losses[6] != other.losses[6]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"width": 64}}, "model.width was 32, is now 64;"),
        ({"data": {"seed": 9}}, "data.seed was 0, is now 9;"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    run_here: RunHere, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    run_here(tmp_path, tiny(steps=3))
    with pytest.raises(CheckpointError, match=f"belongs to another run: {named}"):
        run_here(tmp_path, tiny(steps=6, **change))
    told = [event for event in read_events(tmp_path / "events.jsonl") if event["phase"] != "START"]
    assert told[-1]["event"] == "end"  # of the first run: the second never began


def rewrite_model(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a checkpoint says of its model, with a digest that fits: as another version would have written it."""
    manifest = manifests.read(checkpoint)
    model = dict(manifest.run["model"])
    change(model)
    changed = replace(manifest, run={**manifest.run, "model": model})
    (checkpoint / manifests.MANIFEST).write_text(manifests.render(changed))


def test_a_checkpoint_from_before_a_field_existed_still_resumes(run_here: RunHere, tmp_path: Path) -> None:
    run_here(tmp_path, tiny(steps=3))
    rewrite_model(tmp_path / "checkpoints" / "step-00000003", lambda model: model.pop("qk_norm"))
    resumed = run_here(tmp_path, tiny(steps=6))
    assert [item["data"]["step"] for item in resumed.named("CHECKPOINT", "loaded")] == [3]


def test_a_checkpoint_with_a_field_nobody_knows_is_refused_not_passed_over(run_here: RunHere, tmp_path: Path) -> None:
    run_here(tmp_path, tiny(steps=3))
    rewrite_model(tmp_path / "checkpoints" / "step-00000003", lambda model: model.update(warp_drive=True))
    with pytest.raises(CheckpointError, match="another version of Trainmaster"):
        run_here(tmp_path, tiny(steps=6))
