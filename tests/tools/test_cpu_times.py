"""The table of CPU seconds counts what a file of tests has computed, in processes of its own and in daemons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    burning, idle = (json.loads(line) for line in out.read_text().splitlines())
    assert (burning["file"], burning["tests"]) == ("test_burning.py", 3) and burning["cpu_s"] > 1.2
    assert (idle["file"], idle["tests"]) == ("test_idle.py", 1) and idle["cpu_s"] < 0.5


def test_the_table_adds_up_the_workers() -> None:
    lines = [
        json.dumps({"file": file, "cpu_s": cpu, "wall_s": 10, "tests": 1})
        for file, cpu in (("a.py", 3.0), ("b.py", 5.0), ("a.py", 4.0))
    ]
    assert cpu_times.table(lines, top=1).splitlines()[2:] == ["| a.py | 7 | 20 | 2 |", "| all 2 files | 12 | 30 | 3 |"]
