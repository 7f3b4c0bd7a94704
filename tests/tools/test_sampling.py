"""Of a matrix and of a file's proofs some are drawn, the same ones for the same seed; other tests all run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sampling import TARGET, VARIABLE, draw

TESTS = """
import pytest
@pytest.mark.matrix(one_in=5)
@pytest.mark.parametrize("case", range(10))
def test_alike(case): pass
@pytest.mark.proof
def test_dear(): pass
@pytest.mark.proof
@pytest.mark.parametrize("case", range(5))
def test_dearer(case): pass
def test_plain(): pass
"""
WHOLE = """
import pytest
pytestmark = pytest.mark.matrix(one_in=3, of="files", by_file=True)
@pytest.mark.parametrize("case", range(4))
def test_of_one_outcome(case): pass
"""
LONG = """
import pytest
@pytest.mark.make("images")
@pytest.mark.matrix(one_in=4, of="images")
@pytest.mark.parametrize("case", range(4))
def test_image(case): pass
@pytest.mark.matrix(one_in=4, of="images")
def test_beside(): pass
@pytest.mark.parametrize("pods", [False, pytest.param(True, marks=pytest.mark.make("contract-k8s"))])
def test_both(pods): pass
"""

CASES = [
    *((f"test_a.py::test_many[{number}]", "test_a.py::test_many", 4) for number in range(20)),
    *((f"test_a.py::test_few[{number}]", "test_a.py::test_few", 4) for number in range(2)),
    *((f"test_a.py::test_plain[{number}]", "test_a.py::test_plain", 1) for number in range(3)),
    *((f"test_{file}.py::test_lost", "lost machines", 2) for file in "abcd"),
]


def test_one_in_n_and_one_at_least() -> None:
    counts = Counter(nodeid.partition("[")[0].rpartition("::")[2] for nodeid in draw(CASES, "2026-11-17"))
    assert counts == {"test_many": 5, "test_few": 1, "test_plain": 3, "test_lost": 2}


def test_a_seed_draws_the_same_and_days_draw_all() -> None:
    assert draw(CASES, "2026-11-17") == draw(reversed(CASES), "2026-11-17")
    days = [draw(CASES, f"2026-11-{day:02}") for day in range(1, 29)]
    assert set().union(*days) == {nodeid for nodeid, _, _ in CASES}


@pytest.mark.parametrize(
    ("words", "seed", "passed", "told"),
    [
        (("-n", "1"), "2026-11-17", 9, "8 of 24 tests were drawn"),
        (("-m", "proof"), "2026-11-17", 2, "2 of 6 tests were drawn"),
        ((), None, 25, None),
    ],
)
def test_a_run_says_how_many_were_drawn_and_who_runs_the_rest(
    tmp_path: Path, words: tuple[str, ...], seed: str | None, passed: int, told: str | None
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(WHOLE)
    ended = run(tmp_path, *words, **({VARIABLE: seed} if seed else {}))
    assert f"{passed} passed" in ended.stdout
    lines = [line for line in ended.stdout.splitlines() if line.startswith("matrices and proofs: ") and "drawn" in line]
    assert [line.partition(" by ")[0].removeprefix("matrices and proofs: ") for line in lines] == (
        [told] if told else []
    )
    assert all(line.endswith("`make matrices` runs all") for line in lines)


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  matrix\n  proof\n  make\n")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env = {name: value for name, value in env.items() if name not in (VARIABLE, TARGET)} | variables
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "sampling", "-p", "no:cacheprovider", *words]
    return subprocess.run([*command, "."], cwd=folder, env=env, check=True, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "variables", "passed", "left"),
    [
        ((), {}, "2 passed, 5 deselected", "1 to `make contract-k8s`, 4 to `make images`"),
        # It is left out before anything is drawn: the one case of the matrix that can run does.
        (("-n", "1"), {VARIABLE: "2026-11-17"}, "2 passed", "1 to `make contract-k8s`, 4 to `make images`"),
        ((), {TARGET: "images"}, "6 passed, 1 deselected", "1 to `make contract-k8s`"),
        (("-k", "image"), {TARGET: "images"}, "4 passed, 3 deselected", None),
    ],
)
def test_long_proofs_are_left_to_their_targets(
    tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], passed: str, left: str | None
) -> None:
    (tmp_path / "test_long.py").write_text(LONG)
    told = run(tmp_path, *words, **variables).stdout
    assert passed in told, told
    lines = [line for line in told.splitlines() if line.startswith("long proofs ")]
    assert lines == ([f"long proofs left to their targets: {left}"] if left else [])


def test_the_targets_are_those_of_the_makefile() -> None:
    tests = Path(__file__).parents[1]
    named = {
        name
        for path in (*tests.glob("*/**/test_*.py"), *tests.glob("*/**/conftest.py"))
        if path != Path(__file__)
        for name in re.findall(r"mark\.make\(\"([\w-]+)\"\)", path.read_text())
    }
    makefile = (tests.parent / "Makefile").read_text()
    assert named == set(re.findall(rf"^\t{TARGET}=(\S+)", makefile, re.MULTILINE)) != set()
    assert all(re.search(rf"^{name}:.*##", makefile, re.MULTILINE) for name in named)
