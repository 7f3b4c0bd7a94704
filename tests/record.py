"""The outcome of one pytest run as a JSON file, for tools/ci.py: the exit code and the tests that failed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "TRAINMASTER_TEST_RECORD"
_failed: dict[str, None] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed[report.nodeid] = None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = os.environ.get(VARIABLE)
    if path and not hasattr(session.config, "workerinput"):  # a worker's outcome reaches the session that started it
        Path(path).write_text(json.dumps({"exit": int(exitstatus), "failed": list(_failed)}))
