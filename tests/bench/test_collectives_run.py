"""Real ranks measure every collective, verify it, and what was not compared with anything is not called a pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainmaster.bench.collectives import COLLECTIVES, Report, Row, Sweep, measure
from trainmaster.bench.collectives.run_sweep import document
from trainmaster.bench.collectives.sweep import Point, cut, parse_collectives, points, repeats
from trainmaster.core import schema
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Overall, Verdict

SMALL = Sweep(backend="gloo", processes=3, min_bytes=1 << 10, max_bytes=16 << 10, factor=4, seconds=0.01)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, list[Row]]:
    live: list[Row] = []
    folder = tmp_path_factory.mktemp("run")
    # What another run left in the folder must change nothing.
    (folder / "rank-0.jsonl").write_text('{"what": "met", "points": 2}\n{"what": "done"}\n')
    (folder / "rank-7.jsonl").write_text('{"what": "failed", "why": "long ago"}\n')
    (folder / "store").write_bytes(b"rubbish")
    report = measure(SMALL, folder=folder, on_row=live.append)
    return report, live


@pytest.mark.spawns
def test_every_collective_is_measured_at_every_size_and_told_as_it_finishes(run: tuple[Report, list[Row]]) -> None:
    report, live = run
    assert [(row.collective, row.size_bytes) for row in report.rows] == [
        (name, size) for name in COLLECTIVES for size in (1024, 4096, 16384)
    ]
    assert tuple(live) == report.rows
    assert all(row.complete and row.repeats >= 5 and not row.wrong for row in report.rows)
    assert all(0 < row.median_us <= row.p95_us for row in report.rows)


@pytest.mark.spawns
def test_bus_bandwidth_is_what_nccl_tests_would_print(run: tuple[Report, list[Row]]) -> None:
    factors = {"all_reduce": 4 / 3, "all_gather": 2 / 3, "reduce_scatter": 2 / 3, "all_to_all": 2 / 3}
    for row in run[0].rows:
        assert row.busbw_gbps == pytest.approx(row.algbw_gbps * factors.get(row.collective, 1.0))
        # 3 ranks: 1024 bytes are 256 elements, of which each rank has 85.
        moved = row.size_bytes // 12 * 12
        assert row.algbw_gbps == pytest.approx(moved / row.time_us / 1e3)


@pytest.mark.spawns
def test_without_a_baseline_it_is_measured_and_not_judged(run: tuple[Report, list[Row]]) -> None:
    report, _ = run
    assert report.overall is Overall.INCOMPLETE
    verdicts = {result.check: result.verdict for result in report.results}
    assert verdicts == {
        "collective_ranks": Verdict.PASS,
        "collective_data": Verdict.PASS,
        "collective_transport": Verdict.PASS,
        "collective_bandwidth": Verdict.ERROR,
    }


@pytest.mark.spawns
def test_the_report_is_json_and_comes_back_from_it(run: tuple[Report, list[Row]]) -> None:
    plain = json.loads(json.dumps(document(run[0])))
    assert (plain.pop("overall"), plain.pop("exit_code")) == ("INCOMPLETE", 3)
    assert schema.build(Report, plain) == run[0]


@pytest.mark.spawns
def test_ranks_leave_nothing_running(run: tuple[Report, list[Row]]) -> None:
    assert len(run[0].members) == 3
    assert not [member.pid for member in run[0].members if Path(f"/proc/{member.pid}").exists()]


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
def test_one_rank_alone_runs_every_collective_and_is_no_verdict_on_speed() -> None:
    report = measure(Sweep(backend="gloo", processes=1, max_bytes=8192, seconds=0.001), least_gbps=0.0)
    assert [row.collective for row in report.rows] == list(COLLECTIVES)
    assert report.results[1].verdict is Verdict.PASS
    assert report.overall is Overall.INCOMPLETE


@pytest.mark.parametrize(
    "sweep",
    [
        Sweep(collectives=("all_reduce", "reduce")),
        Sweep(collectives=()),
        Sweep(min_bytes=1 << 20, max_bytes=1 << 10),
        Sweep(min_bytes=1),
        Sweep(factor=1),
        Sweep(processes=0),
        Sweep(timeout_s=0),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(sweep: Sweep) -> None:
    with pytest.raises(UsageError):
        measure(sweep)


def test_a_plan_cut_for_lack_of_memory_keeps_its_order() -> None:
    sweep = Sweep(collectives=("all_reduce", "broadcast"), min_bytes=4, max_bytes=32)
    short = points(sweep, "gloo", largest=10)
    assert short == [
        Point(seq=seq, collective=name, size_bytes=size)
        for seq, (name, size) in enumerate([("all_reduce", 4), ("all_reduce", 8), ("broadcast", 4), ("broadcast", 8)])
    ]
    assert cut(sweep, points(sweep, "gloo"), len(short)) == short


def test_rounds_adapt_to_their_length() -> None:
    assert [repeats(took, 0.2) for took in (1e-6, 0.004, 0.02, 3.0)] == [200, 50, 10, 5]


def test_names_of_nccl_tests_are_understood() -> None:
    assert parse_collectives(["alltoall,AllReduce"]) == ("all_to_all", "all_reduce")
    assert parse_collectives(["all"]) == parse_collectives([]) == COLLECTIVES
