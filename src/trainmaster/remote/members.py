"""Nodes of an attempt with spares: which of them has which place, as the agent of node 0 writes it (MEMBERS_FILE).

Nodes are numbered; the last ones are spares. A place is that of the ranks `place * processes_per_node` and on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SPARES = "spares"  # of a handle: how many of its nodes, the last ones, are spares


def count_places(handle: Mapping[str, Any]) -> int:
    """Nodes of an attempt that have ranks, where its handle counts them."""
    return int(handle["nodes"]) - int(handle.get(SPARES, 0))


def parse_members(text: str | bytes | None) -> list[int] | None:
    """Number of the node in each place; None: no spare has taken one, or the text is none of ours."""
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and all(isinstance(number, int) for number in value) else None


def find_members(told: object, *, places: int, nodes: int) -> list[int]:
    """Node of each place; the first ones where what node 0 told is no answer of this attempt."""
    if not isinstance(told, list) or len(told) != places or told[:1] != [0] or len(set(map(str, told))) != places:
        return list(range(places))
    return told if all(isinstance(number, int) and 0 <= number < nodes for number in told) else list(range(places))
