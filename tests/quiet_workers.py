"""Workers of a parallel run report what is printed: not that a test began, ended, or was set up without fault.

xdist sends five messages for each test, and half of `make quick` are tests of a millisecond. Set-ups and teardowns
that took long are reported, for the list of the slowest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LONG_S = 0.1


def is_printed(name: str, words: dict[str, Any]) -> bool:
    """Whether the process that prints needs this message of a worker."""
    if name == "testreport":
        report = words["data"]
        return bool(report["when"] == "call" or report["outcome"] != "passed" or report["duration"] >= LONG_S)
    return name not in ("logstart", "logfinish")


def pytest_sessionstart(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = _quiet(plugin.sendevent)


def _quiet(send: Callable[..., None]) -> Callable[..., None]:
    def sendevent(name: str, **words: Any) -> None:
        if is_printed(name, words):
            send(name, **words)

    return sendevent
