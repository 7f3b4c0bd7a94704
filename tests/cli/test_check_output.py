"""Output of `check`: one cause is one row, the gravest comes first, and every file that was written is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainmaster.report.html import asset


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A machine without GPUs, expected to have eight."""
    folder = tmp_path_factory.mktemp("check")
    words = ["--expect", "gpus=8", "--expect", "cpus=9999", "--out", str(folder / "evidence")]
    only = ["gpu_count", "gpu_model", "gpu_ecc", "gpu_power", "gpu_memory", "cpu", "kernel"]
    command = [sys.executable, "-m", "trainmaster", "check", "--only", ",".join(only), *words]
    env = {**os.environ, "HOME": str(folder), "COLUMNS": "250", "NO_COLOR": "1"}
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    if "gpu_count" not in done.stdout or "0 of 8 GPUs" not in done.stdout:
        pytest.skip("this machine has GPUs")
    return folder / "evidence", done


def test_findings_of_one_cause_are_one_row(ran: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = ran
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("0 of 8 GPUs") == 1 and "and 3 more" in done.stdout
    (row,) = [
        line
        for line in (folder / "report.md").read_text().splitlines()
        if line.startswith("| fail |") and "0 of 8" in line
    ]
    assert "gpu\\_count" in row and "gpu\\_power" in row


def test_what_comes_first_is_behind_most_findings(ran: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    text = (ran[0] / "report.md").read_text()
    assert "First: " in text and "0 of 8 GPUs" in text.partition("First: ")[2].partition("\n")[0]
    assert "1. use a GPU node" in text, "cpu comes first in the alphabet, and is one finding of six"


def test_every_file_that_was_written_is_named(ran: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = ran
    for path in folder.iterdir():
        assert path.name in done.stderr


def test_without_jinja_all_but_html_is_written(tmp_path: Path) -> None:
    """A base install: the packages of the server are not there."""
    script = (
        "import sys\n"
        "for name in ('jinja2', 'markupsafe', 'sqlalchemy', 'fastapi', 'httpx'): sys.modules[name] = None\n"
        f"sys.argv = ['trainmaster', 'check', '--only', 'kernel', '--out', {str(tmp_path / 'out')!r}]\n"
        "from trainmaster.cli.main import run; run()\n"
    )
    env = {**os.environ, "HOME": str(tmp_path), "COLUMNS": "250", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", script], check=False, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"junit.xml", "metrics.prom", "report.md", "health_check_metrics.json"} <= names
    assert "report.html" not in names and "/pip install -e " in done.stderr and "[server]'" in done.stderr


def test_a_printed_heat_map_is_as_wide_as_the_paper() -> None:
    printed = asset("health/health.css").partition("@media print")[2]
    assert ".heat .scroll { overflow: visible; }" in printed and ".heat svg { width: 100%; height: auto; }" in printed
