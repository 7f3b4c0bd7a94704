"""A second experiment in the folder of the first is refused, unless it is asked for; a longer run is the same one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.errors import CheckpointError
from trainmaster.train.checkpoint import manifest as manifests

from .runs import RunHere, tiny


def begin(run_here: RunHere, folder: Path) -> None:
    run_here(folder, tiny(steps=4))


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed was 0, is now 1"),
        ({"batch_sequences": 16}, "batch_sequences was 8, is now 16"),
        ({"optimizer": {"lr": 1e-3}}, r"optimizer\.lr was 0\.003, is now 0\.001"),
        ({"optimizer": {"schedule": "linear"}}, r"optimizer\.schedule was cosine, is now linear"),
        ({"init_from": "/models/other"}, "init_from was not stated, is now /models/other"),
        ({"master": "bf16"}, "master was fp32, is now bf16"),
        ({"precision": "bf16"}, "precision was auto, is now bf16"),
    ],
)
def test_other_settings_are_refused_with_their_difference_and_continued_on_request(
    run_here: RunHere, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    begin(run_here, tmp_path)
    for steps in (4, 8):  # also where the first run is done, whose result would otherwise be this one's
        with pytest.raises(CheckpointError, match=f"another experiment: {told}; choose another checkpoint.folder"):
            run_here(tmp_path, tiny(steps=steps, **change))
    ran = run_here(tmp_path, tiny(steps=8, **change, checkpoint={"resume": "changed"}))
    assert ran.named("TRAINING", "start")[-1]["data"]["resumed_from"] == 4
    # From here on it is this experiment's.
    run_here(tmp_path, tiny(steps=8, **change))


def test_another_length_of_sequences_is_refused_in_any_case(run_here: RunHere, tmp_path: Path) -> None:
    begin(run_here, tmp_path)
    for resume in ("same", "changed"):
        with pytest.raises(CheckpointError, match=r"sequence_tokens was 32, is now 64; .* skip or repeat tokens"):
            run_here(tmp_path, tiny(steps=8, sequence_tokens=64, checkpoint={"resume": resume}))


def test_a_longer_run_is_the_same_experiment(run_here: RunHere, tmp_path: Path) -> None:
    config = tiny(steps=4)
    run_here(tmp_path, replace(config, optimizer=replace(config.optimizer, warmup_steps=1)))
    assert run_here(tmp_path, tiny(steps=8)).named("TRAINING", "start")[-1]["data"]["resumed_from"] == 4


def test_a_checkpoint_that_does_not_know_its_experiment_is_continued(run_here: RunHere, tmp_path: Path) -> None:
    begin(run_here, tmp_path)
    path = tmp_path / "checkpoints" / "step-00000004"
    manifest = manifests.read(path)
    state = {name: value for name, value in manifest.state.items() if name != "experiment"}
    (path / manifests.MANIFEST).write_text(manifests.render(replace(manifest, state=state)))
    ran = run_here(tmp_path, tiny(steps=8, seed=1))
    assert ran.named("TRAINING", "start")[-1]["data"]["resumed_from"] == 4


def test_settings_that_an_older_version_did_not_record_are_taken_as_they_are(run_here: RunHere, tmp_path: Path) -> None:
    begin(run_here, tmp_path)
    path = tmp_path / "checkpoints" / "step-00000004"
    manifest = manifests.read(path)
    known = {name: manifest.state["experiment"][name] for name in ("seed", "batch_sequences", "sequence_tokens")}
    experiment = {**known, "optimizer": manifest.state["experiment"]["optimizer"]}
    state = {**manifest.state, "experiment": experiment}
    (path / manifests.MANIFEST).write_text(manifests.render(replace(manifest, state=state)))
    ran = run_here(tmp_path, tiny(steps=8, init_from="/models/base"))
    assert ran.named("TRAINING", "start")[-1]["data"]["resumed_from"] == 4
