"""`trainmaster accept --suite`: words that cannot work are refused before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainmaster.cli.main import build


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--only memory", "there is no check memory"),
        ("--only kernel,memory", "there is no check memory"),
        ("--expect gpus=many", "gpus"),
        ("--batch-size 100000000000", "--batch-size 100000000000: write a number from 1 to 1,000,000"),
    ],
)
def test_wrong_words_begin_no_suite(tmp_path: Path, words: str, said: str) -> None:
    given = ["accept", "--suite", "quick", "--out", str(tmp_path / "out"), "--home", str(tmp_path), *words.split()]
    done = CliRunner().invoke(build(guarded=True), given, env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "out").exists()


def test_a_plan_needs_a_cluster(tmp_path: Path) -> None:
    done = CliRunner().invoke(build(guarded=True), ["accept", "--dry-run", "plan", "--home", str(tmp_path)])
    assert done.exit_code == 2
    assert "--on kubernetes" in done.output
