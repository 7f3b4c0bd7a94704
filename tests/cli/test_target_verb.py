"""`trainmaster target` where nothing was made known: what is built in is named, and what is not is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trainmaster import targets
from trainmaster.cli.main import build


def run(home: Path, *words: str) -> Result:
    return CliRunner().invoke(build(guarded=True), ["target", *words, "--home", str(home)], env={"COLUMNS": "300"})


@pytest.mark.parametrize("name", targets.names())
def test_a_target_that_is_built_in_is_no_error(name: str, tmp_path: Path) -> None:
    shown = run(tmp_path, "show", name)
    words = " ".join(shown.output.split())  # however wide the console is
    assert shown.exit_code == 0 and targets.traits(name).title in words and "no project" in words


def test_nothing_is_known_or_granted(tmp_path: Path) -> None:
    assert "--on local" in " ".join(run(tmp_path, "list").output.split())
    assert json.loads(run(tmp_path, "list", "--json").output) == {"targets": []}
    for words in (["show", "nope"], ["show", "local", "--json"]):
        refused = run(tmp_path, *words)
        assert refused.exit_code == 2 and "is known or granted" in " ".join(refused.output.split())
