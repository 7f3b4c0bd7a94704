"""Transactions of a backlog are bounded by time, not by a number of lines."""

from __future__ import annotations

from trainmaster.control.commits import FEWEST_LINES, MOST_LINES, TARGET_S, TransactionSize


def test_slow_lines_come_in_transactions_that_fit_the_target() -> None:
    size, line_s = TransactionSize(), 0.001
    took = []
    for _ in range(20):
        took.append(size.lines * line_s)
        size.adapt(size.lines, took[-1])
    assert max(took[1:]) <= TARGET_S


def test_fast_lines_come_in_large_ones() -> None:
    size = TransactionSize()
    for _ in range(5):
        size.adapt(size.lines, size.lines * 1e-5)
    assert size.lines == MOST_LINES


def test_one_line_alone_says_little_about_the_cost_of_many() -> None:
    size = TransactionSize()
    before = size.lines
    size.adapt(1, TARGET_S / 10)  # the fixed cost of a transaction
    assert size.lines == before


def test_a_stalled_machine_leaves_progress() -> None:
    size = TransactionSize()
    size.adapt(100, 60.0)
    assert size.lines == FEWEST_LINES
    size.adapt(FEWEST_LINES, 0.001)
    assert size.lines > FEWEST_LINES
