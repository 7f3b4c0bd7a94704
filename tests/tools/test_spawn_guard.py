"""A test without the mark `spawns` that starts something fails, whatever hides it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of the installed plugins none is needed, and loading them takes seconds.
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def test_an_unmarked_test_that_starts_a_process_or_a_server_fails(tmp_path: Path) -> None:
    (tmp_path / "test_spawning.py").write_text(
        "import os, socket, subprocess, threading\n"
        "import pytest\n"
        "def hide(action):\n"
        "    thread = threading.Thread(target=lambda: pytest.raises(BaseException, action))\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "def start(): subprocess.run(['true'])\n"
        "def listen(): socket.socket().bind(('127.0.0.1', 0))\n"
        "def test_process(): start()\n"
        "def test_server(): listen()\n"
        "def test_hidden(): hide(start)\n"
        "@pytest.mark.spawns\n"
        "def test_marked(): start()\n"
        "def test_neither(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    spawns: x\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "spawn_guard", "-p", "no:cacheprovider", "."]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    names = set(re.findall(r"^(?:FAILED|ERROR) test_spawning\.py::(\w+)", ran.stdout, re.MULTILINE))
    assert names == {"test_process", "test_server", "test_hidden"}, ran.stdout
