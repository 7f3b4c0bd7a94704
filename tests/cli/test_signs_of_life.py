"""A verb that starts ranks prints a line before torch is loaded: that takes seconds, and minutes on a busy machine."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from trainmaster.bench import accept
from trainmaster.bench.collectives import run_sweep
from trainmaster.cli.main import build
from trainmaster.core.errors import TrainmasterError


@pytest.mark.parametrize(
    ("words", "where", "said"),
    [
        ("bandwidth", (run_sweep, "run_sweep"), "starting the ranks"),
        ("bandwidth --json", (run_sweep, "run_sweep"), "starting the ranks"),
        ("accept", (accept, "run"), "starting the ranks"),
        ("accept --suite quick", (accept, "count_gpus"), "suite quick in "),
    ],
)
def test_a_line_comes_before_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, where: tuple[object, str], said: str
) -> None:
    def stop(*_: object, **__: object) -> NoReturn:
        raise TrainmasterError("here torch is imported")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(*where, stop)
    done = CliRunner().invoke(build(guarded=True), words.split(), env={"COLUMNS": "300"})
    assert said in done.stderr.partition("here torch is imported")[0]
    assert done.stdout == ""
