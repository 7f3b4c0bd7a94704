"""What `make test` draws by the day: some of many alike cases, and some of the dear proofs of a file.

`@pytest.mark.matrix(one_in=5)` is for a parametrised test or a module. With `of="lost machines"` all tests that carry
these words, in one file or in several, are one matrix; with `by_file=True` each of its files is one case, for files
whose tests look at the outcome of one dear fixture. `@pytest.mark.proof` is for a test of a CPU second or more beside
which cheaper ones show that the thing works: the proofs of a folder are one matrix, of which one in four is drawn.
Of each matrix one case at least is drawn. TRAINMASTER_SAMPLE is the seed and switches this on; the same seed draws the
same cases. Without it, as in `pytest FILE` and `make matrices`, nothing is left out of these.

`@pytest.mark.make("images")` is for proofs of many minutes, which `make images` alone runs: it names itself in
TRAINMASTER_PROOFS_OF. A run says at its end how many it left to which target.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

VARIABLE = "TRAINMASTER_SAMPLE"
TARGET = "TRAINMASTER_PROOFS_OF"
PROOFS_ONE_IN = 4
_COUNTS = pytest.StashKey[tuple[int, ...]]()  # tests that were drawn, and those of which they were
_LEFT = pytest.StashKey[dict[str, int]]()  # tests that were left to other targets
_KEPT: dict[str, pytest.StashKey[Any]] = {"sampled": _COUNTS, "left": _LEFT}


def pytest_report_header() -> str | None:
    seed = os.environ.get(VARIABLE)
    return f"matrices and proofs: sampled; {VARIABLE}={seed} draws the same cases" if seed else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Draw among all that was collected; count what `-m` and `-k` have left of it."""
    seed = os.environ.get(VARIABLE)
    target = os.environ.get(TARGET)
    others = {item: name for item in items if (name := target_of(item)) not in (None, target)}
    of = {item: matrix_of(item) for item in items if item not in others}
    kept = draw(of.values(), seed) if seed else {case for case, _, _ in of.values()}
    yield
    config.stash[_LEFT] = dict(Counter(others[item] for item in items if item in others))
    there = [item for item in items if item in of]
    left = [item for item in there if of[item][0] in kept]
    if seed:
        config.stash[_COUNTS] = tuple(sum(of[item][2] > 1 for item in some) for some in (left, there))
    config.hook.pytest_deselected(items=[item for item in items if item in others or of[item][0] not in kept])
    items[:] = left


def target_of(item: pytest.Item) -> str | None:
    """The target of the Makefile that alone runs a test; None for most."""
    mark = item.get_closest_marker("make")
    return str(mark.args[0]) if mark else None


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
    if hasattr(session.config, "workeroutput"):
        for name, key in _KEPT.items():
            session.config.workeroutput[name] = session.config.stash.get(key, None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for name, key in _KEPT.items():
        if counts := getattr(node, "workeroutput", {}).get(name):
            node.config.stash[key] = counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    drawn, cases = config.stash.get(_COUNTS, (0, 0))
    if cases:
        terminalreporter.write_line(
            f"matrices and proofs: {drawn} of {cases} tests were drawn by {VARIABLE}={os.environ.get(VARIABLE)};"
            " `make matrices` runs all"
        )
    if left := config.stash.get(_LEFT, None):
        told = ", ".join(f"{count} to `make {name}`" for name, count in sorted(left.items()))
        terminalreporter.write_line(f"long proofs left to their targets: {told}")
