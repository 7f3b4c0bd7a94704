"""Baselines carry their key, size and source; only what fits all of it is compared; nothing is judged by an average."""

from __future__ import annotations

import pytest

from trainmaster.bench import limits
from trainmaster.bench.limits import Baseline, Key
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Finding, Verdict

H100 = Key(gpu="H100", nodes=1, gpus_per_node=8, fabric="nvlink", collective="all_reduce")
MIB, GIB = 1 << 20, 1 << 30


def judge(key: Key | None, seen: dict[int, float], least: float | None = None) -> Finding:
    return limits.judge(key, seen, baselines=limits.load(), least_gbps=least, collective="all_reduce")


def find(gpu: str, nodes: int, fabric: str, size: int | None, **words: str) -> list[Baseline]:
    return [
        base
        for base in limits.load()
        if (base.key.gpu, base.key.nodes, base.key.fabric, base.size_bytes) == (gpu, nodes, fabric, size)
        and all(getattr(base.key, name) == value for name, value in words.items())
    ]


def test_every_baseline_has_a_source_and_is_there_once() -> None:
    seen = [(base.key, base.size_bytes, base.kind, base.source) for base in limits.load()]
    assert len(seen) == len(set(seen)) == 41
    assert all(base.source and base.busbw_gbps > 0 for base in limits.load())


@pytest.mark.parametrize(
    ("gpu", "nodes", "fabric", "size", "gbps"),
    [
        ("A100", 1, "nvlink", 16 * GIB, 235), ("H100", 1, "nvlink", 128 * MIB, 396), ("H200", 1, "nvlink", GIB, 464),
        ("B200", 1, "nvlink", 16 * GIB, 846), ("GB200", 18, "nvlink", 8 * GIB, 847), ("A100", 2, "efa", 2 * GIB, 78),
        ("H100", 2, "efa", GIB, 437), ("H200", 16, "efa", 16 * GIB, 370), ("B300", 2, "efa", 64 * GIB, 751),
        ("H200", 2, "ib", 8 * GIB, 481), ("B200", 2, "roce", 8 * GIB, 684), ("H100", 12, "ib", 8 * GIB, 387),
        ("H200", 2, "tcp", 8 * GIB, 3.8),
    ],
)  # fmt: skip
def test_published_figures_are_kept(gpu: str, nodes: int, fabric: str, size: int, gbps: float) -> None:
    found = [base for base in find(gpu, nodes, fabric, size) if base.kind != "floor"]
    assert [base.busbw_gbps for base in found] == [gbps]


@pytest.mark.parametrize(
    ("gbps", "verdict"), [(442.0, Verdict.PASS), (400.0, Verdict.PASS), (390.0, Verdict.WARN), (350.0, Verdict.FAIL)]
)
def test_the_verdict_follows_the_share_of_the_figure_at_its_size(gbps: float, verdict: Verdict) -> None:
    finding = judge(H100, {GIB: gbps})
    assert finding.verdict is verdict
    assert "1 GiB" in finding.reason and "442" in finding.reason and "awsome-distributed-ai" in finding.reason


def test_the_worst_size_decides_and_an_average_never_does() -> None:
    assert judge(H100, {128 * MIB: 396.0, GIB: 300.0}).verdict is Verdict.FAIL
    # Tiny messages pull any average down; only the named sizes count.
    assert judge(H100, {8192: 0.2, MIB: 30.0, 128 * MIB: 396.0, GIB: 442.0}).verdict is Verdict.PASS


@pytest.mark.parametrize(
    "key",
    [
        Key(gpu="H100", nodes=3, gpus_per_node=8, fabric="ib", collective="all_reduce"),
        Key(gpu="H100", nodes=1, gpus_per_node=4, fabric="nvlink", collective="all_reduce"),
        Key(gpu="H100", nodes=1, gpus_per_node=8, fabric="host", collective="all_reduce"),
        Key(gpu="H100", nodes=1, gpus_per_node=8, fabric="nvlink", collective="all_to_all"),
        Key(gpu="H100", nodes=1, gpus_per_node=8, fabric="nvlink", collective="all_reduce", algorithm="ring"),
        Key(gpu="H100 PCIe", nodes=1, gpus_per_node=8, fabric="nvlink", collective="all_reduce"),
        Key(gpu="H200", nodes=2, gpus_per_node=8, fabric="tcp", collective="all_reduce"),  # a symptom is no baseline
        Key(gpu="H200", nodes=1, gpus_per_node=8, fabric="nvlink", collective="all_gather"),  # its size is not stated
        None,
    ],
)
def test_what_nobody_published_is_not_judged(key: Key | None) -> None:
    finding = judge(key, {8 * GIB: 3.0, GIB: 3.0})
    assert finding.verdict is Verdict.SKIP
    assert "measured, not judged" in finding.reason


def test_a_sweep_without_the_named_sizes_is_an_error_that_says_which() -> None:
    finding = judge(H100, {64 * MIB: 300.0})
    assert finding.verdict is Verdict.ERROR
    assert finding.action == "run again with --max 128M or more"
    assert judge(H100, {}).verdict is Verdict.ERROR


def test_a_users_own_floor_holds_at_the_largest_size() -> None:
    assert judge(None, {8192: 0.1, MIB: 2.0}, least=1.5).verdict is Verdict.PASS
    assert judge(None, {8192: 9.0, MIB: 1.0}, least=1.5).verdict is Verdict.FAIL
    assert judge(H100, {128 * MIB: 396.0}, least=400).verdict is Verdict.FAIL


def test_product_names_become_models_and_other_boards_do_not() -> None:
    assert limits.gpu_model("NVIDIA H100 80GB HBM3") == "H100"
    assert limits.gpu_model("NVIDIA A100-SXM4-40GB") == "A100"
    assert limits.gpu_model("NVIDIA H100 PCIe") == "H100 PCIe"
    assert limits.gpu_model("NVIDIA H100 NVL") not in {base.key.gpu for base in limits.load()}


def test_an_algorithm_that_was_forced_is_another_key() -> None:
    assert limits.algorithm({}) == "default"
    assert limits.algorithm({"NCCL_ALGO": "Ring"}) == "ring"
    assert limits.algorithm({"NCCL_NVLS_ENABLE": "0"}) == "no-nvls"
    assert limits.algorithm({}, in_switch=True) == "sharp"


@pytest.mark.parametrize(("text", "size"), [("8K", 8192), ("128M", 128 * MIB), ("8g", 8 * GIB), ("16 GiB", 16 * GIB)])
def test_sizes_are_read_as_nccl_tests_reads_them(text: str, size: int) -> None:
    assert limits.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "8X", "-1", "1.5G", "G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        limits.parse_size(text)
