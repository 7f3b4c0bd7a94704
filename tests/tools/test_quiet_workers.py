"""A worker's message is left out where nothing of it is printed, and never one of a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quiet_workers import LONG_S, is_printed


@pytest.mark.parametrize(
    ("when", "outcome", "duration", "printed"),
    [
        ("call", "passed", 0.0, True),
        ("setup", "passed", 0.0, False),
        ("setup", "passed", LONG_S, True),
        ("setup", "skipped", 0.0, True),
        ("setup", "failed", 0.0, True),
        ("teardown", "passed", 0.0, False),
        ("teardown", "failed", 0.0, True),
    ],
)
def test_reports(when: str, outcome: str, duration: float, printed: bool) -> None:
    data = {"when": when, "outcome": outcome, "duration": duration}
    assert is_printed("testreport", {"data": data}) is printed


def test_other_messages() -> None:
    names = ("logstart", "logfinish", "runtest_protocol_complete", "warning_recorded", "workerfinished")
    assert [name for name in names if not is_printed(name, {})] == ["logstart", "logfinish"]


TESTS = """
import pytest
@pytest.fixture
def broken(): raise ValueError("no set-up")
@pytest.fixture
def left():
    yield
    raise ValueError("no teardown")
def test_good(): pass
def test_bad(): assert 1 == 2
def test_no_setup(broken): pass
def test_no_teardown(left): pass
@pytest.mark.skip(reason="no machine")
def test_skipped(): pass
"""


@pytest.mark.spawns
def test_a_parallel_run_tells_of_each_outcome(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    words = ["-q", "-ra", "-n", "1", "-p", "xdist", "-p", "quiet_workers", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *words, "."]
    ended = subprocess.run(command, cwd=tmp_path, env=env, check=False, capture_output=True, text=True)
    assert "1 failed, 2 passed, 1 skipped, 2 errors" in ended.stdout, ended.stdout
    for word in ("no set-up", "no teardown", "assert 1 == 2", "no machine", "[100%]"):
        assert word in ended.stdout
