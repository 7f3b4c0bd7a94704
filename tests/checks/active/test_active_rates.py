"""Rates among equal GPUs: many slow ones do not hide each other, and small differences are normal."""

from __future__ import annotations

import pytest

from trainmaster.checks.active import _rates


def verdicts(*peers: float) -> list[str]:
    return [
        str(_rates.judge([rate] * 3, "TFLOPS", stated=None, state_as="gemm_tflops", known=None, peers=peers,
                         slow="look").verdict)
        for rate in peers
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ([100.0] * 4 + [50.0] * 4, ["pass"] * 4 + ["fail"] * 4),
        ([100.0, 101.0, 99.0, 100.0, 10.0, 11.0, 10.0, 10.0], ["pass"] * 4 + ["fail"] * 4),
        ([100.0] * 3 + [50.0] * 5, ["pass"] * 3 + ["fail"] * 5),
        ([100.0] + [50.0] * 7, ["pass"] + ["warn"] * 7),
        ([100.0, 95.0, 60.0], ["pass", "pass", "warn"]),
        ([100.0, 80.0, 1.0], ["pass", "pass", "fail"]),
        ([100.0] * 7 + [70.0], ["pass"] * 7 + ["fail"]),
        ([100.0] * 7 + [90.0], ["pass"] * 7 + ["warn"]),
        ([100.0, 97.0, 99.0, 96.0, 101.0, 98.0, 100.0, 97.0], ["pass"] * 8),
    ],
)
def test_slow_gpus_do_not_hide_each_other(peers: list[float], expected: list[str]) -> None:
    assert verdicts(*peers) == expected


def test_the_sentence_of_a_divided_node() -> None:
    judged = _rates.judge(
        [50.0], "GB/s", stated=None, state_as="hbm_gbps", known=None, peers=[100.0, 100.0, 50.0, 50.0], slow="look"
    )
    assert "none can be called usual" in judged.words
