"""Verdicts of acceptance runs, from records of ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from trainmaster.bench.accept.judge import CHECKS, judge, judge_lost, load
from trainmaster.bench.accept.options import Options, parse_fault
from trainmaster.bench.accept.record import RankRecord
from trainmaster.bench.accept.results import build, percentiles
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Overall, Verdict, judge_overall

OPTIONS = Options(min_throughput=1.0, active_iterations=4)
FLOPS = 24_000_000_000


def record(rank: int, **changes: Any) -> RankRecord:
    plain = RankRecord(
        rank=rank, node=rank // 2, host=f"node{rank // 2}", device="NVIDIA H100 80GB HBM3", gpu=f"GPU-{rank}",
        precision="bf16", backend="nccl", parameters=25_557_032, elapsed_s=1.0, steps_s=[0.25] * 4, alone_s=[0.2] * 4,
        losses=[7.0, 6.0, 5.0, 4.0], parameters_digest="p", gradients_digest="g", gradients_again="g",
        memory_bytes=1 << 30, compiled=True, graphed=True,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def overall(records: list[RankRecord], options: Options = OPTIONS) -> Overall:
    return judge_overall(judge(options, records, flops=FLOPS), planned=CHECKS)


def accused(records: list[RankRecord]) -> set[tuple[str, str | None]]:
    found = judge(OPTIONS, records, flops=FLOPS)
    bad = (Verdict.FAIL, Verdict.WARN, Verdict.ERROR)
    return {(one.check, finding.device) for one in found for finding in one.findings if finding.verdict in bad}


def test_healthy_ranks_pass() -> None:
    assert overall([record(rank) for rank in range(4)]) is Overall.PASS


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"parameters_digest": "other"}, "accept_parameters"),
        ({"gradients_digest": "other", "gradients_again": "other"}, "accept_gradients"),
        ({"gradients_again": "other"}, "accept_gradients"),
        ({"losses": [7.0, math.nan, math.nan, math.nan]}, "accept_loss"),
        ({"losses": [7.0, math.inf, 5.0, 4.0]}, "accept_loss"),
        ({"alone_s": [0.26] * 4}, "accept_stragglers"),
    ],
)
def test_a_rank_with_a_fault_is_named(changes: dict[str, Any], check: str) -> None:
    records = [record(0), record(1), record(2, **changes), record(3)]
    assert accused(records) == {(check, "rank2")}
    assert overall(records) is Overall.FAIL


def test_two_ranks_that_differ_fail_without_a_name() -> None:
    assert accused([record(0), record(1, parameters_digest="other")]) == {("accept_parameters", None)}


def test_gradients_of_other_gpus_are_not_compared() -> None:
    other = record(2, device="NVIDIA A100-SXM4-80GB", gradients_digest="a", gradients_again="a")
    assert accused([record(0), record(1), other]) == set()


def test_without_a_baseline_nothing_passes() -> None:
    assert overall([record(0), record(1)], Options(active_iterations=4)) is Overall.INCOMPLETE


def test_the_floor_of_the_user_decides() -> None:
    fast = dataclasses.replace(OPTIONS, min_throughput=1e6)
    assert overall([record(0), record(1)], fast) is Overall.FAIL


def test_more_than_the_peak_is_no_measurement() -> None:
    records = [record(rank, elapsed_s=1e-6) for rank in range(2)]
    assert accused(records) == {("accept_throughput", None)}
    assert overall(records) is Overall.INCOMPLETE


def test_a_lost_rank_fails() -> None:
    assert judge_overall(judge_lost({1: "ended with 9"}), planned=CHECKS) is Overall.FAIL


def test_every_sample_is_counted_once() -> None:
    records = [record(rank, elapsed_s=2.0) for rank in range(4)]
    document = build(OPTIONS, records, judge(OPTIONS, records, flops=FLOPS), Overall.PASS, flops=FLOPS)
    assert document["total_samples"] == 4 * 32 * 4
    assert document["throughput_samples_per_second"] == 4 * 32 * 4 / 2.0
    assert document["communication_share"] == pytest.approx(0.2)


def test_percentiles_are_steps_that_were_measured() -> None:
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0, "max": 3.0}


def test_baselines_have_sources() -> None:
    assert load()
    assert all(one.source and one.samples_per_s > 0 for one in load())


@pytest.mark.parametrize("text", ["slow", "melt:1", "flip:-1", "flip:1:0.3", "slow:1:nan", "slow:1:-1", "flip:one"])
def test_a_wrong_injection_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--inject"):
        parse_fault(text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 0}, "--batch-size"),
        ({"model": "vgg"}, "--model"),
        ({"data_mode": "cifar10"}, "--data-mode"),
        ({"learning_rate": math.nan}, "--learning-rate"),
        ({"compile": "yes"}, "--compile"),
        ({"model": "transformer", "width": 10, "heads": 3}, "--width"),
        ({"min_throughput": 0.0}, "--min-throughput"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Options(**changes).checked()
