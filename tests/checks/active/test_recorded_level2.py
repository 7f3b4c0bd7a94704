"""The active tests as they were measured on a real H200 are judged the same here, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster import checks
from trainmaster.core.expect import Expect
from trainmaster.core.results import Overall, Verdict, judge_overall
from trainmaster.node.recorded import RecordedHost

H200 = Path(__file__).parents[2] / "hosts" / "h200"


def test_level_2_of_the_recorded_h200_passes() -> None:
    results = checks.run(RecordedHost(H200), Expect(gpus=1, gpu_model="H200"), level=2)
    assert judge_overall(results, planned=checks.plan(2)) is Overall.PASS
    measured = {result.check: result.verdict for result in results}
    for name in ("cuda_init", "gemm", "hbm", "pcie_copy", "memory_pattern", "corruption", "disk_io"):
        assert measured[name] is Verdict.PASS


@pytest.mark.parametrize(("stated", "verdict"), [(780.0, Verdict.PASS), (800.0, Verdict.FAIL)])
def test_a_stated_rate_is_held_against_what_was_measured(stated: float, verdict: Verdict) -> None:
    (result,) = checks.run(RecordedHost(H200), Expect(gpus=1, gemm_tflops=stated), level=2, only=["gemm"])
    assert result.verdict is verdict
