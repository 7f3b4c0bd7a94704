"""The whole curve of nccl-tests is judged: shapes without a baseline, holes, a summary that its rows contradict."""

from __future__ import annotations

import re

import pytest
from nccl_tables import averaged, healthy, shape

from trainmaster.bench import nccl_tests
from trainmaster.core.results import CheckResult, Overall, judge_overall


def overall(result: CheckResult) -> Overall:
    return judge_overall([result], planned=[nccl_tests.CHECK])


def reasons(result: CheckResult) -> str:
    return "\n".join(f"{finding.verdict} {finding.reason}" for finding in result.findings)


@pytest.mark.parametrize(
    ("gpu", "nodes", "each", "gbps"),
    [
        ("NVIDIA B200", 1, 4, 660.0),
        ("NVIDIA GB200", 1, 4, 680.0),
        ("NVIDIA H20", 1, 8, 370.0),
        ("NVIDIA L40S", 1, 8, 11.0),
        ("NVIDIA H100 80GB HBM3", 4, 8, 380.0),
        ("NVIDIA B200", 16, 8, 370.0),
        ("NVIDIA GB200", 2, 4, 800.0),
    ],
)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_a_tenfold_loss_fails_where_no_baseline_fits(
    gpu: str, nodes: int, each: int, gbps: float, collective: str
) -> None:
    slow = nccl_tests.judge(shape(gpu, nodes, each, gbps / 10, collective=collective), ranks=nodes * each)
    assert overall(slow) is Overall.FAIL, reasons(slow)
    well = nccl_tests.judge(shape(gpu, nodes, each, gbps, collective=collective), ranks=nodes * each)
    # Between nodes nothing shows what carried it; inside a node the link is known.
    assert overall(well) is (Overall.PASS if nodes == 1 else Overall.INCOMPLETE), reasons(well)


def replaced(table: str, size: int, gbps: float) -> str:
    """The table with another bandwidth at one size, and the right time and average for it."""
    (line,) = [line for line in table.splitlines() if line.split()[:1] == [str(size)]]
    cells = line.split()
    share = gbps / float(cells[7])
    for at in (5, 9):
        cells[at] = f"{float(cells[at]) / share:.1f}"
        cells[at + 1], cells[at + 2] = (f"{float(cells[at + n]) * share:.2f}" for n in (1, 2))
    return averaged(table.replace(line, "  " + "  ".join(cells)))


@pytest.mark.parametrize(
    ("size", "gbps", "verdict"),
    [(256 << 20, 40.0, Overall.FAIL), (4 << 30, 40.0, Overall.FAIL), (256 << 20, 320.0, Overall.PASS)],
)
def test_a_hole_in_the_curve_fails_between_sizes_with_a_baseline(size: int, gbps: float, verdict: Overall) -> None:
    table = shape("NVIDIA H100 80GB HBM3", 1, 8, 470.0)
    assert overall(nccl_tests.judge(table, ranks=8)) is Overall.PASS
    result = nccl_tests.judge(replaced(table, size, gbps), ranks=8)
    assert overall(result) is verdict, reasons(result)
    assert ("hole" in reasons(result)) == (verdict is Overall.FAIL)


@pytest.mark.parametrize("average", ["3.1", "3778", "300"])
def test_a_summary_that_contradicts_its_rows_is_no_pass(average: str) -> None:
    table = re.sub(r"(Avg bus bandwidth +: )[\d.]+", rf"\g<1>{average}", healthy())
    result = nccl_tests.judge(table, ranks=8)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert "the summary contradicts the rows" in reasons(result)
