"""A wrong word on the command line is answered with the right one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainmaster.cli.health import check
from trainmaster.cli.main import build
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import CheckResult, Finding, ok, skip


def run(*words: str) -> str:
    result = CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}).invoke(build(guarded=True), list(words))
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("word", "verb"),
    [
        ("status", "show"),
        ("describe", "show"),
        ("ps", "jobs"),
        ("list", "jobs"),
        ("run", "submit"),
        ("launch", "submit"),
        ("apply", "submit"),
        ("queue", "jobs"),
        ("stop", "cancel"),
        ("down", "cancel"),
        ("submti", "submit"),
    ],
)
def test_a_word_of_another_program_names_our_verb(word: str, verb: str) -> None:
    assert f"No such command '{word}'. Did you mean '{verb}'?" in run(word)


def test_a_script_is_not_a_spec(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\n")
    assert "train.py is a script, not a spec; start from: trainmaster examples command.yaml > job.yaml" in run(
        "submit", str(script)
    )


def test_the_beginning_of_check_names_lists_them() -> None:
    text = run("check", "--only", "gpu")
    assert "there is no check gpu; did you mean gpu_" in text
    assert "gpu_clocks" in text and "gpu_vbios" in text


def test_faults_of_a_check_create_nothing_anyway() -> None:
    text = run("check", "--expect", "foo=1")
    assert "1 fault" in text and "created" not in text


@pytest.mark.parametrize(
    ("finding", "said"), [(skip("no GPU", proof="PCI bus: 0 of 6 devices"), True), (ok("8 GPUs"), False)]
)
def test_a_pass_without_a_gpu_says_so(finding: Finding, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"cpu": ok("2 CPUs usable"), "gpu_count": finding}
    results = [CheckResult(check=name, findings=(found,), took_s=0.0) for name, found in rows.items()]
    node = NodeHealth(node="a", level=1, planned=tuple(rows), results=tuple(results))
    check._print_text(node, ClusterHealth(asked=("a",), nodes=(node,)), None, since="")
    text = capsys.readouterr().out
    assert ("no GPU was checked: none found and none expected (--expect gpus=8)" in text) == said
