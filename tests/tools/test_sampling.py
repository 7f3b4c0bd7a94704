"""Of a matrix some cases are drawn, the same ones for the same seed; other tests all run."""

from __future__ import annotations

from collections import Counter

from sampling import draw

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
