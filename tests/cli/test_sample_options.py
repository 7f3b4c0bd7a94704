"""Options of AWS's FSDP sample, as its users type them, are answered with our names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainmaster.cli.main import build
from trainmaster.cli.training.train import join_options
from trainmaster.core.errors import SpecError


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
