"""The table of CPU seconds counts what a test has computed, in processes of its own and in daemons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cpu_times

ROOT = Path(__file__).parents[2]
BURN = "import time\nwhile time.process_time() < 0.4: pass\n"
# 0.4 s in each of three: here, in a child that is waited for, in a daemon that nobody waits for.
TESTS = f"""
import os, subprocess, sys, time
def burn():
    end = time.process_time() + 0.4
    while time.process_time() < end: pass
def test_here(): burn()
def test_child(): subprocess.run([sys.executable, "-c", {BURN!r}], check=True)
def test_daemon():
    code = {BURN!r} + "open('burnt', 'w').close()\\ntime.sleep(60)"
    start = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True)"
    with open("pid", "w") as pid:
        subprocess.run([sys.executable, "-c", start, code], stdout=pid, check=True)
    while not os.path.exists("burnt"): time.sleep(0.01)
"""


def test_children_and_daemons_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_burning.py").write_text(TESTS)
    (tmp_path / "test_idle.py").write_text("def test_nothing(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    out = tmp_path / "times"
    env = {
        **os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        cpu_times.VARIABLE: str(out),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cpu_times", "-p", "no:cacheprovider", "."]
    try:
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    finally:
        if (pid := tmp_path / "pid").exists():
            os.kill(int(pid.read_text()), 9)
    used = {line["test"].rpartition("::")[2]: line["cpu_s"] for line in map(json.loads, out.read_text().splitlines())}
    assert list(used) == ["imports and collection", "test_here", "test_child", "test_daemon", "test_nothing"]
    assert min(used["test_here"], used["test_child"], used["test_daemon"]) > 0.4 and used["test_nothing"] < 0.3


def test_without_control_groups_living_daemons_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMASTER_CPU_TIMES_OF", "")
    meter = cpu_times.Descendants()
    before = meter.read()
    monkeypatch.chdir(tmp_path)
    functions: dict[str, Callable[[], None]] = {}
    exec(TESTS, functions)
    try:
        functions["test_daemon"]()
        assert meter.read() - before > 0.4
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)


def test_the_table_adds_up_the_workers() -> None:
    tests = (("a.py::test_x[1]", 3.0), ("b.py::test_y", 5.0), ("a.py::test_x[2]", 4.0), ("a.py::test_z", 1.0))
    lines = [json.dumps({"test": test, "cpu_s": cpu, "wall_s": 10}) for test, cpu in tests]
    files, each = (cpu_times.table(lines, top=1, end=end).splitlines()[2:] for end in ("::", "["))
    assert files == ["| a.py | 8.0 | 30.0 | 3 |", "| all 2 | 13.0 | 40.0 | 4 |"]
    assert each == ["| a.py::test_x | 7.0 | 20.0 | 2 |", "| all 3 | 13.0 | 40.0 | 4 |"]
