"""Mistakes that tools of the field make about throughput, each on its own input: our verdict is right on it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from trainmaster.bench import limits
from trainmaster.bench.collectives.gather import RunOutcome, row_of
from trainmaster.bench.collectives.judge import judge
from trainmaster.bench.collectives.result import PLANNED, Member, Row, Timing
from trainmaster.bench.collectives.sweep import Point
from trainmaster.bench.collectives.transport import Proof
from trainmaster.bench.limits import Key
from trainmaster.cli.main import build
from trainmaster.core.errors import UsageError
from trainmaster.core.results import CheckResult, Overall, Verdict, exit_code, judge_overall, ok

MIB, GIB = 1 << 20, 1 << 30
PROOF = Proof(words="NET/IB", fabric="ib", finding=ok("carried by NET/IB"))


def timing(rank: int, mean_us: float, size: int) -> Timing:
    return Timing(
        rank=rank, seq=0, repeats=20, mean_us=mean_us, median_us=mean_us, p95_us=mean_us, bytes=size, verify_s=0.0,
        took_s=0.0,
    )  # fmt: skip


def row(size: int, busbw: float, world: int = 8) -> Row:
    """A row of all_reduce with this bus bandwidth."""
    mean_us = size * 2 * (world - 1) / world / busbw / 1e3
    point = Point(seq=0, collective="all_reduce", size_bytes=size)
    return row_of(point, [timing(rank, mean_us, size) for rank in range(world)], world)


def verdict(rows: list[Row], key: Key, *, world: int = 8, nodes: int = 1) -> tuple[CheckResult, ...]:
    device = "NVIDIA H100 80GB HBM3" if key.gpu == "H100" else f"NVIDIA {key.gpu}"
    members = [Member(rank=rank, host=f"n{rank // 8}", pid=rank, device=device) for rank in range(world)]
    outcome = RunOutcome(
        members=tuple(members), rows=tuple(rows), partial=(), lost=(), planned=len(rows), notes=(), timings=()
    )
    return judge(outcome, world=world, nodes=nodes, proof=PROOF, keys={"all_reduce": key}, least_gbps=None)


def overall(results: tuple[CheckResult, ...]) -> Overall:
    return judge_overall(results, planned=PLANNED)


def key(gpu: str, nodes: int, fabric: str) -> Key:
    return Key(gpu=gpu, nodes=nodes, gpus_per_node=8, fabric=fabric, collective="all_reduce")


def test_a_floor_of_half_a_gigabyte_per_second_would_pass_a_fall_back_to_tcp() -> None:
    """2×8 H200 at 3.8 GB/s is eight times a floor of 0.5, and less than a hundredth of what the fabric gives."""
    results = verdict([row(8 * GIB, 3.8, world=16)], key("H200", 2, "ib"), world=16, nodes=2)
    assert overall(results) is Overall.FAIL
    assert "1% of 481" in results[3].findings[0].reason


@pytest.mark.parametrize(("size", "busbw"), [(128 * MIB, 396.0), (GIB, 442.0)])
def test_a_floor_that_hardware_cannot_reach_at_this_size_fails_nobody(size: int, busbw: float) -> None:
    """Azure's floor for 8×H100 is 460, at 16 GiB. A healthy node gives 396 at 128 MiB, and is healthy."""
    floors = [base for base in limits.load() if base.key == key("H100", 1, "nvlink") and base.kind == "floor"]
    assert max(base.busbw_gbps for base in floors) > busbw
    assert overall(verdict([row(size, busbw)], key("H100", 1, "nvlink"))) is Overall.PASS


def test_the_same_floor_counts_at_its_own_size() -> None:
    results = verdict([row(16 * GIB, 450.0)], key("H100", 1, "nvlink"))
    assert overall(results) is Overall.WARN
    assert "floor 460" in results[3].findings[0].reason


def test_a_warning_is_not_overwritten_by_a_pass() -> None:
    """Slow at 128 MiB, fine at 1 GiB, whichever is judged last."""
    slow, fine = row(128 * MIB, 0.85 * 396), row(GIB, 442.0)
    for rows in ([slow, fine], [fine, slow]):
        results = verdict(rows, key("H100", 1, "nvlink"))
        assert results[3].verdict is Verdict.WARN
        assert overall(results) is Overall.WARN
        assert (exit_code(overall(results)), exit_code(overall(results), strict=True)) == (0, 1)


@pytest.mark.parametrize("world", [2, 8, 64])
def test_throughput_is_neither_multiplied_by_the_world_nor_summed_over_it(world: int) -> None:
    """Every rank took 1 ms for the same 100 MB: that is 100 GB/s, however many ranks say so."""
    point = Point(seq=0, collective="all_reduce", size_bytes=100_000_000)
    found = row_of(point, [timing(rank, 1000.0, 100_000_000) for rank in range(world)], world)
    assert found.algbw_gbps == pytest.approx(100.0)
    assert found.busbw_gbps == pytest.approx(100.0 * 2 * (world - 1) / world)


def test_one_slow_rank_is_the_speed_of_all() -> None:
    point = Point(seq=0, collective="all_reduce", size_bytes=1_000_000)
    found = row_of(point, [timing(0, 10.0, 1_000_000), timing(1, 40.0, 1_000_000)], 2)
    assert (found.slowest_rank, found.algbw_gbps) == (1, pytest.approx(25.0))


def test_a_benchmark_without_a_verdict_is_not_a_pass() -> None:
    results = verdict([row(GIB, 5000.0)], key("a GPU nobody knows", 1, "nvlink"))
    assert overall(results) is Overall.INCOMPLETE
    assert exit_code(overall(results)) == 3


@pytest.mark.parametrize(
    ("gpu", "nodes", "busbw", "expected"),
    [
        ("L40S", 1, 15.0, Overall.PASS),  # of PCIe 4
        ("L40S", 1, 1.0, Overall.FAIL),
        ("H20", 1, 400.0, Overall.PASS),
        ("H20", 1, 40.0, Overall.FAIL),
        ("B200", 1, 5000.0, Overall.INCOMPLETE),  # more than its links can carry
        ("H100", 7, 4.0, Overall.FAIL),  # by what is published for other numbers of nodes
        ("H100", 7, 300.0, Overall.INCOMPLETE),
    ],
)
def test_a_shape_without_a_baseline_is_judged_by_its_class(
    gpu: str, nodes: int, busbw: float, expected: Overall
) -> None:
    """As a table of nccl-tests is: an own sweep ended INCOMPLETE whatever it measured."""
    world = 8 * nodes
    unknown = Key(gpu=gpu, nodes=nodes, gpus_per_node=8, fabric="unknown", collective="all_reduce")
    assert overall(verdict([row(4 * GIB, busbw, world=world)], unknown, world=world, nodes=nodes)) is expected


def test_nothing_measured_is_not_a_pass() -> None:
    assert overall(verdict([], key("H100", 1, "nvlink"))) is Overall.INCOMPLETE


@pytest.mark.parametrize("floor", ["nan", "inf", "0", "-5"])
@pytest.mark.parametrize("more", [[], ["--nccl-tests", "all_reduce.log"]])
def test_a_floor_that_nothing_can_miss_is_refused(floor: str, more: list[str]) -> None:
    ran = CliRunner().invoke(build(), ["bandwidth", f"--min-busbw={floor}", *more])
    assert isinstance(ran.exception, UsageError)
    assert ran.exception.exit_code == 2
    assert "--min-busbw" in str(ran.exception)
