"""Tests without the mark `spawns` start no process and no server: what `make quick` runs is held to that.

The mark is set here for the tests of folders that live from processes, of modules that import what starts them, and
of those that use such a fixture; others carry it themselves. A hook on Python's audit events sees every fork, every
program that is started and every port that is bound, whatever code does it: an unmarked test fails there and then.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDERS = frozenset("agent client control deploy e2e sims storage targets".split())
FIXTURES = frozenset("postgres s3 browser tab slurm start daemon managed run_here warm programs".split())
# Modules of the standard library and of tests/ that start something, and some of ours that tests call for that.
_STARTERS = re.compile(
    r"^\s*(?:from|import) (?:subprocess|multiprocessing|http\.server|uvicorn|trainmaster\.control\b)",
    re.MULTILINE,
)
_MODULE_MARK = re.compile(r"^pytestmark = pytest\.mark\.(\w+)$", re.MULTILINE)
_WRITTEN = frozenset({"alone", "matrix"})  # marks that no plugin sets: a file that does not name them has none
_IMPORTED = re.compile(r"^\s*(?:from ([\w.]+) import|import ([\w.]+))", re.MULTILINE)

_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"})
_BIND = "socket.bind"


class Spawned(BaseException):
    """Raised where an unmarked test starts something; code under test that catches Exception does not swallow it."""


class Guard:
    """Refuses processes and servers while an unmarked test runs."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        self.older: frozenset[int | None] = frozenset()  # threads that earlier tests left: not this test's doing

    def audit(self, event: str, args: tuple[object, ...]) -> None:
        if self.on and (event in _EVENTS or event == _BIND) and threading.get_ident() not in self.older:
            self.seen.append(f"{event} {args[:2]!r}"[:200])
            raise Spawned(f"{self.seen[-1]}: a test that starts a process or a server is marked `spawns`")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files and folders unread whose every test is left out: `make quick` took longest for their imports."""
    words = config.option.markexpr.split(" and ") if " or " not in config.option.markexpr else []
    if collection_path.parent == TESTS and collection_path.name in FOLDERS and "not spawns" in words:
        return True  # nor its conftest files, whose imports cost more
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    missing = [word for word in words if word in _WRITTEN and f"mark.{word}" not in collection_path.read_text()]
    left_out = {word.removeprefix("not ") for word in words if word.startswith("not ")}
    return True if missing or left_out & _marks(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if set(getattr(item, "fixturenames", ())) & FIXTURES or "spawns" in _marks(item.path):
            item.add_marker(pytest.mark.spawns)


@functools.cache
def _marks(path: Path) -> frozenset[str]:
    """Marks of every test of this file."""
    folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    spawns = folder in FOLDERS or _starts(path)
    return frozenset(_MODULE_MARK.findall(path.read_text())) | ({"spawns"} if spawns else set())


@functools.cache
def _starts(path: Path) -> bool:
    """Whether a module of tests/, or one of tests/ that it imports, imports a starter."""
    text = path.read_text()
    if _STARTERS.search(text):
        return True
    for found in _IMPORTED.finditer(text):
        name = (found[1] or found[2]).replace(".", "/")
        for base in (TESTS, path.parent):
            if (other := base / f"{name}.py").exists() and other != path and _starts(other):
                return True
    return False


_GUARD = Guard()
sys.addaudithook(_GUARD.audit)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _GUARD.seen.clear()
    _GUARD.older = frozenset(thread.ident for thread in threading.enumerate()) - {threading.get_ident()}
    _GUARD.on = item.get_closest_marker("spawns") is None
    try:
        return (yield)
    finally:
        _GUARD.on = False


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail a test whose code under test hid the refusal, in a thread for example."""
    assert not _GUARD.seen, _GUARD.seen
