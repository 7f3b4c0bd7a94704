"""The navigation of every page: one list, in order. An entry is shown where the server has its route."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from starlette.routing import BaseRoute, Route


class Entry(NamedTuple):
    """One entry. A template names its own by `{% set section = "Runs" %}`; `g` and then `key` goes there."""

    label: str
    path: str
    key: str


ENTRIES = (
    Entry("Runs", "/", "r"),
    Entry("Queue", "/queue", "q"),
    Entry("Nodes", "/nodes", "n"),
    Entry("Compare", "/compare", "c"),
    Entry("Cost", "/cost", "m"),
    Entry("Settings", "/settings", "s"),
)


def shown(routes: Iterable[BaseRoute]) -> tuple[Entry, ...]:
    """The entries whose path is among these routes."""
    paths = {route.path for route in routes if isinstance(route, Route)}
    return tuple(entry for entry in ENTRIES if entry.path in paths)
