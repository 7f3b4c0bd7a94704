"""Relative paths of a config start at the folder of the command: data, checkpoints, exports, `init_from`."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fork_server import ForkServer
from trainmaster.cli.training import train as train_verb
from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import Reason

CONFIG = """
device: cpu
model: { layers: 1, width: 32, heads: 2, kv_heads: 1, ffn_width: 64, vocab: 256 }
data: { source: prepared, path: tokens }
steps: 2
batch_sequences: 1
sequence_tokens: 32
optimizer: { warmup_steps: 1 }
eval_sequences: 0
checkpoint: { every_steps: 2, folder: saved/here }
"""


def run(programs: ForkServer, folder: Path, *words: str) -> str:
    done = programs.run("trainmaster", *words, env=os.environ, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_prepare_train_and_export_with_relative_paths(programs: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("Once upon a time there was a test. " * 200)
    (tmp_path / "config.yaml").write_text(CONFIG)
    run(programs, tmp_path, "data", "prepare", "corpus.txt", "--out", "tokens")
    run(programs, tmp_path, "train", "config.yaml")
    assert (tmp_path / "saved" / "here" / "step-00000002" / "manifest.json").exists()
    run(programs, tmp_path, "export", "saved/here", "model")
    assert (tmp_path / "model" / "config.json").exists()
    run(programs, tmp_path, "train", "config.yaml", "init_from=saved/here/step-00000002", "checkpoint.folder=again")
    assert (tmp_path / "again" / "step-00000002" / "manifest.json").exists()


@pytest.mark.parametrize(("reason", "fruitless", "goes_on"), [
    (Reason.BAD_CHECKPOINT, 1, False), (Reason.BAD_CHECKPOINT, 0, True), (Reason.CRASHED, 1, True),
])  # fmt: skip
def test_a_folder_that_was_refused_is_not_asked_again(
    tmp_path: Path, reason: Reason, fruitless: int, goes_on: bool
) -> None:
    (tmp_path / "step-00000010").mkdir()
    record = ExitRecord(attempt="a", ok=False, ended_at="2026-03-01T12:00:00+00:00", reason=reason, message="x")
    plan = SimpleNamespace(checkpoints=str(tmp_path))
    assert train_verb._may_go_on(1, record, plan, fruitless) is goes_on  # type: ignore[arg-type]
