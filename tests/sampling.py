"""What `make test` draws by the day: some of many alike cases, and some of the dear proofs of a file.

`@pytest.mark.matrix(one_in=5)` is for a parametrised test or a module. With `of="lost machines"` all tests that carry
these words, in one file or in several, are one matrix; with `by_file=True` each of its files is one case, for files
whose tests look at the outcome of one dear fixture. `@pytest.mark.proof` is for a test of a CPU second or more beside
which cheaper ones show that the thing works: the proofs of a folder are one matrix, of which one in four is drawn.
Of each matrix one case at least is drawn. TRAINMASTER_SAMPLE is the seed and switches this on; the same seed draws the
same cases. Without it, as in `pytest FILE` and `make matrices`, nothing is left out.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

VARIABLE = "TRAINMASTER_SAMPLE"
PROOFS_ONE_IN = 4
_COUNTS = pytest.StashKey[tuple[int, ...]]()  # tests that were drawn, and those of which they were


def pytest_report_header() -> str | None:
    seed = os.environ.get(VARIABLE)
    return f"matrices and proofs: sampled; {VARIABLE}={seed} draws the same cases" if seed else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Draw among all that was collected; count what `-m` and `-k` have left of it."""
    seed = os.environ.get(VARIABLE)
    kept = draw(map(matrix_of, items), seed) if seed else set()
    yield
    if not seed:
        return
    left = [item for item in items if matrix_of(item)[0] in kept]
    config.stash[_COUNTS] = tuple(sum(matrix_of(item)[2] > 1 for item in some) for some in (left, items))
    config.hook.pytest_deselected(items=[item for item in items if matrix_of(item)[0] not in kept])
    items[:] = left


def matrix_of(item: pytest.Item) -> tuple[str, str, int]:
    """The case that a test is or belongs to, its matrix, and one in how many is drawn."""
    file = item.nodeid.partition("::")[0]
    if mark := item.get_closest_marker("matrix"):
        name = mark.kwargs.get("of") or item.nodeid.partition("[")[0]
        return file if mark.kwargs.get("by_file") else item.nodeid, name, int(mark.kwargs["one_in"])
    if item.get_closest_marker("proof"):
        return item.nodeid, file.rpartition("/")[0], PROOFS_ONE_IN
    return item.nodeid, item.nodeid, 1


def draw(cases: Iterable[tuple[str, str, int]], seed: str) -> set[str]:
    """Cases to run, of (case, its matrix, one in how many); of each matrix one at least."""
    matrices: dict[tuple[str, int], set[str]] = defaultdict(set)
    for case, name, part in cases:
        matrices[name, part].add(case)
    kept: set[str] = set()
    for (_, part), alike in matrices.items():
        by_lot = sorted(alike, key=lambda case: hashlib.sha256(f"{seed} {case}".encode()).digest())
        kept.update(by_lot[: max(1, round(len(alike) / part))])
    return kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells its counts to the process that prints; every worker has collected the same."""
    if hasattr(session.config, "workeroutput") and _COUNTS in session.config.stash:
        session.config.workeroutput["sampled"] = session.config.stash[_COUNTS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if counts := getattr(node, "workeroutput", {}).get("sampled"):
        node.config.stash[_COUNTS] = tuple(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    drawn, cases = config.stash.get(_COUNTS, (0, 0))
    if cases:
        terminalreporter.write_line(
            f"matrices and proofs: {drawn} of {cases} tests were drawn by {VARIABLE}={os.environ.get(VARIABLE)};"
            " `make matrices` runs all"
        )
