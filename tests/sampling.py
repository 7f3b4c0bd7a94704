"""Matrices: `make test` runs some of many alike cases, drawn by the day; `make matrices` runs every one.

`@pytest.mark.matrix(one_in=5)` on a parametrised test or on a module. With `of="lost machines"` all tests that carry
these words, in one file or in several, are one matrix. Of each matrix one case at least is drawn. TRAINMASTER_SAMPLE is
the seed and switches this on; the same seed draws the same cases. Without it, as in `pytest FILE`, nothing is left out.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable

import pytest

VARIABLE = "TRAINMASTER_SAMPLE"


def pytest_report_header() -> str | None:
    seed = os.environ.get(VARIABLE)
    return f"matrices: sampled; {VARIABLE}={seed} draws the same cases" if seed else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = os.environ.get(VARIABLE)
    if not seed:
        return
    kept = draw(((item.nodeid, *matrix_of(item)) for item in items), seed)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def matrix_of(item: pytest.Item) -> tuple[str, int]:
    """Name of the matrix that a test is a case of, and one in how many is drawn."""
    mark = item.get_closest_marker("matrix")
    name = mark.kwargs.get("of") if mark else None
    return name or item.nodeid.partition("[")[0], int(mark.kwargs["one_in"]) if mark else 1


def draw(cases: Iterable[tuple[str, str, int]], seed: str) -> set[str]:
    """Node ids to run, of (node id, its matrix, one in how many); of each matrix one case at least."""
    matrices: dict[tuple[str, int], list[str]] = defaultdict(list)
    for nodeid, name, part in cases:
        matrices[name, part].append(nodeid)
    kept: set[str] = set()
    for (_, part), alike in matrices.items():
        by_lot = sorted(alike, key=lambda nodeid: hashlib.sha256(f"{seed} {nodeid}".encode()).digest())
        kept.update(by_lot[: max(1, round(len(alike) / part))])
    return kept
