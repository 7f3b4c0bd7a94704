"""What continuous integration lets pass: two flaky tests at most, by name, and nothing that did not run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# Of the installed plugins none is needed, and loading them takes seconds.
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def load_ci() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci", ROOT / "tools" / "ci.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CI = load_ci()
PASSED = {"exit": 0, "failed": []}


def failed(*tests: str) -> dict[str, object]:
    return {"exit": 1, "failed": list(tests)}


def not_run(_: Sequence[str]) -> bool:
    raise AssertionError("nothing is to be run again")


def test_all_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert CI.judge([PASSED, PASSED], not_run) == 0
    assert capsys.readouterr().out == ""


def test_two_that_pass_the_second_time_are_named_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert CI.judge([failed("a::x"), failed("b::y")], lambda tests: tests == ["a::x", "b::y"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["FLAKY: a::x", "FLAKY: b::y"]


def test_one_that_fails_again_fails_the_run() -> None:
    assert CI.judge([failed("a::x"), PASSED], lambda _: False) == 1


def test_three_failures_are_not_run_again() -> None:
    assert CI.judge([failed("a::x", "a::y"), failed("b::z")], not_run) == 1


@pytest.mark.parametrize(
    "record",
    [
        {"exit": None, "failed": []},  # no record: pytest did not end
        {"exit": 2, "failed": ["a::x"]},  # interrupted
        {"exit": 5, "failed": []},  # nothing collected
        {"exit": 1, "failed": []},  # failed without a failed test: a collection error
        {"exit": 0, "failed": ["a::x"]},
    ],
)
def test_a_part_that_did_not_run_to_its_end_fails_the_run(record: dict[str, object]) -> None:
    assert CI.judge([PASSED, record], not_run) == 1


@pytest.mark.spawns
@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "parallel"])
def test_the_record_of_a_real_run(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "test_two.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError\n"
        "def test_set_up(broken): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "record", "-p", "no:cacheprovider", *workers, "."]
    environment = {**os.environ, **ENVIRONMENT, CI.RECORD: str(record)}
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode == 1
    found = json.loads(record.read_text())
    assert found["exit"] == 1 and sorted(found["failed"]) == ["test_two.py::test_bad", "test_two.py::test_set_up"]


@pytest.mark.spawns
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
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "record", "-p", "spawn_guard", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, **ENVIRONMENT, CI.RECORD: str(record)}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    names = {test.rpartition("::")[2] for test in json.loads(record.read_text())["failed"]}
    assert names == {"test_process", "test_server", "test_hidden"}
