"""Options of AWS's FSDP sample, as its users type them, are answered with our names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainmaster.cli.main import build
from trainmaster.core.errors import SpecError
from trainmaster.documents.yaml_file import join_options
from trainmaster.train.__main__ import read_config


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--max_steps", "3", "--lr=1e-3", "steps=4"], ["max_steps=3", "lr=1e-3", "steps=4"]),
        (["--cpu_offload", "--bf16", "1"], ["cpu_offload=true", "bf16=1"]),
        (["--cpu_offload"], ["cpu_offload=true"]),
        (["--steps", "-3"], ["steps=-3"]),
        ([], []),
    ],
)
def test_options_become_values(words: list[str], values: list[str]) -> None:
    assert join_options(words) == values


def test_each_option_is_answered_with_our_name(tmp_path: Path) -> None:
    config = tmp_path / "t.yaml"
    config.write_text("steps: 3\n")
    words = ["train", str(config), "--max_steps", "3", "--train_batch_size=4", "--processes", "1"]
    done = CliRunner().invoke(build(), words)
    assert isinstance(done.exception, SpecError), done.output
    faults = {re.split(r"[ :]", fault.path)[-1]: fault.message for fault in done.exception.faults}
    assert faults.keys() == {"max_steps", "train_batch_size"}
    assert "`steps`" in faults["max_steps"] and "`batch_sequences`" in faults["train_batch_size"]


@pytest.mark.parametrize("name", ["t.yaml", "t.json"])
def test_a_rank_under_torchrun_takes_values_and_answers_options_too(tmp_path: Path, name: str) -> None:
    config = tmp_path / name
    config.write_text('{"steps": 3}')
    taken = read_config([str(config), "steps=16", "--optimizer.lr", "1e-3"])
    assert (taken.steps, taken.optimizer.lr) == (16, 1e-3)
    with pytest.raises(SpecError, match="`steps`"):
        read_config([str(config), "--max_steps", "3"])
