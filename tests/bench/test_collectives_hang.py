"""A rank that is killed, stopped, late or failed is named within the timeout; what was measured before is kept."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainmaster.bench.collectives import Sweep, measure
from trainmaster.bench.collectives.hang import RankView, find_lost_ranks
from trainmaster.bench.collectives.progress import Progress, ProgressFile, ProgressReader
from trainmaster.bench.collectives.sweep import points
from trainmaster.core.results import Overall

PLAN = points(Sweep(min_bytes=1024, max_bytes=4096), "gloo")
SICK_RANK = (sys.executable, str(Path(__file__).with_name("sick_rank.py")))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_points(boards: list[Path], count: int) -> list[dict[str, Any]]:
    """Who the ranks are, once each has left so many points."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        told = [lines(path) for path in boards]
        if all(sum(line["what"] == "left" for line in rank) >= count for rank in told):
            return [next(line for line in rank if line["what"] == "here") for rank in told]
        time.sleep(0.02)
    raise AssertionError("the ranks never got there")


@pytest.mark.matrix(one_in=4, of="ranks that hang")
@pytest.mark.alone
@pytest.mark.parametrize("seed", [7])
def test_one_killed_and_one_stopped_of_four_are_both_named(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    killed, stopped = rng.sample(range(4), 2)
    boards = [tmp_path / "ranks" / f"rank-{rank}.jsonl" for rank in range(4)]
    command = [
        sys.executable, "-m", "trainmaster", "bandwidth", "--processes", "4", "--backend", "gloo", "--max", "64M",
        "--timeout", "20", "--json", "--out", str(tmp_path),
    ]  # fmt: skip
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        here = wait_for_points(boards, rng.randint(3, 9))
        os.kill(here[stopped]["pid"], signal.SIGSTOP)
        os.kill(here[killed]["pid"], signal.SIGKILL)
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    report = json.loads(output)
    assert (launcher.returncode, report["overall"], report["exit_code"]) == (1, "FAIL", 1)
    named = {lost["rank"]: lost for lost in report["lost"]}
    assert set(named) == {killed, stopped}
    assert (named[killed]["state"], named[stopped]["state"]) == ("killed", "stopped")
    for rank, lost in named.items():
        assert (lost["host"], lost["pid"]) == (here[rank]["host"], here[rank]["pid"])
        assert f"rank {rank} on {here[rank]['host']} (pid {here[rank]['pid']})" in lost["reason"]
        assert lost["collective"] is not None and lost["size_bytes"] in {8192 << shift for shift in range(14)}
    finished = min(sum(line["what"] == "left" for line in lines(path)) for path in boards)
    assert finished >= 3
    assert len(report["rows"]) == finished, "every size that all finished is kept"
    assert all(row["heard"] == [0, 1, 2, 3] for row in report["rows"])
    assert not [one["pid"] for one in here if Path(f"/proc/{one['pid']}").exists()], "nothing is left running"
    assert json.loads((tmp_path / "bandwidth.json").read_text()) == report


@pytest.mark.matrix(one_in=4, of="ranks that hang")
@pytest.mark.alone  # healthy ranks answer within 3 s
def test_a_stopped_rank_alone_is_named_when_the_timeout_is_over(tmp_path: Path) -> None:
    sweep = Sweep(
        backend="gloo", processes=2, collectives=("all_reduce",), min_bytes=1024, max_bytes=4096, timeout_s=3.0,
        seconds=0.01,
    )  # fmt: skip
    report = measure(sweep, folder=tmp_path, program=SICK_RANK, env={"SICK": "1:stop:all_reduce:2048"})
    assert report.overall is Overall.FAIL
    (lost,) = report.lost
    assert (lost.rank, lost.state, lost.collective, lost.size_bytes) == (1, "stopped", "all_reduce", 2048)
    assert [row.size_bytes for row in report.rows] == [1024]
    assert not Path(f"/proc/{lost.pid}").exists()


@pytest.mark.matrix(one_in=4, of="ranks that hang")
@pytest.mark.alone  # healthy ranks answer within 3 s
def test_a_rank_that_never_enters_is_told_from_those_that_wait(tmp_path: Path) -> None:
    sweep = Sweep(
        backend="gloo", processes=3, collectives=("all_reduce",), min_bytes=3072, max_bytes=6144, timeout_s=3.0,
        seconds=0.01,
    )  # fmt: skip
    report = measure(sweep, folder=tmp_path, program=SICK_RANK, env={"SICK": "2:sleep:all_reduce:6144"})
    (lost,) = report.lost
    assert (lost.rank, lost.state) == (2, "behind")
    assert [row.size_bytes for row in report.rows] == [3072]


def view(rank: int, seq: int, op: int, inside: bool = True, **words: Any) -> RankView:
    return RankView(
        rank=rank, host=f"n{rank}", pid=rank, progress=Progress(seq=seq, op=op, inside=inside, beats=1), **words
    )


def test_who_was_dragged_along_is_not_blamed() -> None:
    views = [
        view(0, 1, 4, exit_code=1, error="RuntimeError: Connection closed by peer", failed_at=1.0),
        view(1, 1, 4, exit_code=-9),
        view(2, 1, 4, exit_code=-6),
        view(3, 1, 4, exit_code=1, error="RuntimeError: Connection closed by peer", failed_at=0.5),
    ]
    (lost,) = find_lost_ranks(views, PLAN, waited_s=1)
    assert (lost.rank, lost.state, lost.collective, lost.size_bytes) == (1, "killed", "all_reduce", 2048)
    assert "SIGKILL" in lost.reason


def test_of_several_that_failed_the_first_is_named() -> None:
    views = [
        view(0, 1, 4, exit_code=1, error="RuntimeError: Connection closed", failed_at=2.0),
        view(1, 1, 4, exit_code=1, error="OutOfMemoryError: CUDA out of memory", failed_at=1.0),
    ]
    (lost,) = find_lost_ranks(views, PLAN, waited_s=1)
    assert (lost.rank, lost.state) == (1, "failed")
    assert "out of memory" in lost.reason


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (view(2, 0, 9, inside=False), "had left round 9 of all_reduce of 1 KiB"),
        (view(2, 1, 3, inside=False), "had left round 3 of all_reduce of 2 KiB"),
        (view(2, -1, 0, inside=False), "had not met the others yet"),
        (view(2, 1, 3, state="D"), "waits in the kernel"),
    ],
)
def test_the_one_furthest_behind_is_named_and_where_it_was(late: RankView, words: str) -> None:
    (lost,) = find_lost_ranks([view(0, 1, 4), view(1, 1, 4), late], PLAN, waited_s=60)
    assert (lost.rank, lost.state) == (2, "behind")
    assert words in lost.reason


def test_where_all_went_in_and_none_came_out_nobody_is_accused() -> None:
    (lost,) = find_lost_ranks([view(0, 1, 4), view(1, 1, 4)], PLAN, waited_s=60)
    assert (lost.rank, lost.state, lost.host) == (None, "hung", "n0, n1")


def test_a_rank_that_ended_too_early_without_a_word_is_named() -> None:
    (lost,) = find_lost_ranks([view(0, 1, 4), view(1, 1, 4, exit_code=0)], PLAN, waited_s=1)
    assert lost.rank == 1
    assert "exit code 0" in lost.reason


def test_half_a_line_waits_for_its_rest_and_progress_outlives_its_writer(tmp_path: Path) -> None:
    board, reader = ProgressFile(tmp_path, 0), ProgressReader(tmp_path, 0)
    assert reader.progress() == Progress()
    board.record("met", points=3)
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"what": "do')
        file.flush()
        assert [line["what"] for line in reader.lines()] == ["met"]
        file.write('ne"}\nnot json\n')
    assert [line["what"] for line in reader.lines()] == ["done"]
    board.advance(2, 7, inside=True)
    board.close()
    assert reader.progress().position == (2, 7, True)
