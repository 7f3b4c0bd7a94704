"""A checkpoint that version 0.1.0 wrote on two ranks is resumed today: the files on disk are a public format."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from ..runs import RunHere, Start, tiny

WRITTEN = Path(__file__).parent / "checkpoint-0.1.0.tar.xz"
# Losses of steps 3 and 4 that the run which wrote it went on to (torch 2.13, CPU).
LOSSES = {3: 5.494659, 4: 5.457850}
CONFIG = tiny(
    model={"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn_width": 32, "vocab": 256},
    optimizer={"lr": 0.003, "warmup_steps": 2},
    steps=4,
    checkpoint={"every_steps": 2, "keep": 2},
)


def unpack(folder: Path) -> None:
    with tarfile.open(WRITTEN) as archive:
        archive.extractall(folder / "checkpoints", filter="data")


def test_an_old_checkpoint_is_resumed_by_as_many_ranks(tmp_path: Path, start: Start) -> None:
    unpack(tmp_path)
    ran = start(tmp_path, CONFIG, ranks=2).finish()
    assert ran.codes == [0, 0], ran.output
    assert ran.losses == pytest.approx(LOSSES, abs=1e-5)


def test_an_old_checkpoint_is_resumed_by_one_rank(tmp_path: Path, run_here: RunHere) -> None:
    unpack(tmp_path)
    ran = run_here(tmp_path, CONFIG)
    assert [item["data"]["step"] for item in ran.named("CHECKPOINT", "loaded")] == [2]
    assert ran.losses == pytest.approx(LOSSES, abs=1e-5)
