"""nccl-tests is read in every width and from every launcher, and its numbers say how many ranks met."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trainmaster.node.parse import ParseError, nccl_tests

SAMPLES = Path(__file__).parent / "samples"


def text(name: str) -> str:
    return (SAMPLES / f"nccl-tests-{name}").read_text()


def only(name: str) -> nccl_tests.Run:
    (run,) = nccl_tests.parse(text(name)).runs
    return run


@pytest.mark.parametrize(
    ("name", "collective", "ranks", "rows"),
    [
        ("2-nodes.txt", "all_reduce", 16, 11),
        ("2-nodes.json", "all_reduce", 16, 7),
        ("per-iteration.txt", "all_gather", 8, 9),
        ("2019.txt", "all_reduce", 8, 5),
    ],
)
def test_a_whole_run_has_no_fault(name: str, collective: str | None, ranks: int, rows: int) -> None:
    run = only(name)
    assert run.faults == ()
    assert (run.collective, len(run.devices), len(run.rows), run.corrupt) == (collective, ranks, rows, False)
    assert run.proven_ranks() == (ranks, ranks)


def test_a_run_is_read_at_a_size() -> None:
    row = only("2-nodes.txt").at(1 << 30)
    assert row is not None and row.in_place is not None
    assert (row.in_place.busbw_gbps, row.in_place.wrong) == (428.41, 0)
    assert only("2-nodes.txt").at(12345) is None


def test_two_runs_of_one_node_are_not_one_run_of_two() -> None:
    runs = nccl_tests.parse(text("two-single-nodes.txt")).runs
    assert [(run.label, run.hosts, run.proven_ranks()) for run in runs] == [
        ("0", ("node1",), (8, 8)),
        ("1", ("node2",), (8, 8)),
    ]
    assert all(run.faults == () for run in runs)


def test_runs_one_after_the_other_are_kept_apart() -> None:
    runs = nccl_tests.parse(text("2-nodes.txt") + text("2-nodes.txt")).runs
    assert [len(run.rows) for run in runs] == [11, 11]


@pytest.mark.parametrize("mark", ["0: ", "node1: ", "[1,7]<stdout>:", "2026-01-05T10:00:00.123456789Z stdout F ", ""])
def test_the_mark_of_a_launcher_is_no_part_of_the_table(mark: str) -> None:
    plain = text("per-iteration.txt")
    marked = "".join(mark + line + "\n" for line in plain.splitlines())
    (before,), (after,) = nccl_tests.parse(plain).runs, nccl_tests.parse(marked).runs
    assert after.rows == before.rows
    assert after.faults == ()


def test_lines_of_nccl_between_the_rows_do_no_harm() -> None:
    lines = text("per-iteration.txt").splitlines()
    mixed = "\n".join(line + "\nnode1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM" for line in lines)
    assert nccl_tests.parse(mixed).runs[0].rows == only("per-iteration.txt").rows
    assert nccl_tests.parse(mixed + "\nnode1:1:2 [0] misc/x.cc:1 NCCL WARN oops").warnings != ()


@pytest.mark.parametrize("name", ["wrong.txt", "wrong.json"])
def test_wrong_values_are_corruption(name: str) -> None:
    run = only(name)
    assert run.corrupt and run.out_of_bounds == 1
    assert sum(side.wrong or 0 for row in run.rows for side in (row.in_place, row.out_of_place) if side) > 0


def test_a_value_that_was_not_checked_is_not_zero() -> None:
    (run,) = nccl_tests.parse(re.sub(r"       0\b(?!\.)", "     N/A", text("2-nodes.txt"))).runs
    assert run.faults == ()
    assert {row.in_place.wrong for row in run.rows if row.in_place} == {None}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("# Out of bounds values : 0 OK", "", "without its summary"),
        ("  1048576  ", "  10 4857", "cannot be read"),
        ("#  Rank  3", "#  Rank  2", "come twice"),
        ("   30.34   56.89", "  303.40  568.90", "contradict"),
        ("[1,0]<stdout>:     4194304", "", "sizes were measured"),
        ("# nThread", "", "parameters"),
    ],
)
def test_what_is_damaged_shows_as_a_fault(old: str, new: str, fault: str) -> None:
    whole = text("2-nodes.txt")
    assert old in whole
    (run,) = nccl_tests.parse(whole.replace(old, new, 1)).runs
    assert any(fault in item for item in run.faults), run.faults


def test_a_rank_that_is_not_listed_is_missed_by_the_bandwidths() -> None:
    lines = [line for line in text("2-nodes.txt").splitlines() if "Rank 15" not in line]
    (run,) = nccl_tests.parse("\n".join(lines)).runs
    assert run.faults == ("15 ranks are listed, but the bandwidths are those of 16",)


def test_bandwidths_that_fit_no_number_of_ranks_are_a_fault() -> None:
    report = json.loads(text("2-nodes.json"))
    report["results"][2]["in_place"]["bus_bw"] *= 0.99
    (run,) = nccl_tests.parse(json.dumps(report)).runs
    assert any("fit no number" in fault for fault in run.faults)


def test_a_failure_in_words_is_an_error() -> None:
    output = nccl_tests.parse("node1: Test NCCL failure common.cu:1005 'unhandled system error'\n")
    assert output.errors and output.runs == ()


def test_the_environment_in_a_report_is_not_kept() -> None:
    report = json.loads(text("2-nodes.json"))
    report["env"].append("AWS_SECRET_ACCESS_KEY=hunter2")
    assert "hunter2" not in repr(nccl_tests.parse(json.dumps(report)))


@pytest.mark.parametrize("raw", ["", "hello\nworld", "{}", '{"results": 3}', "{", b"\xff\xfe"])
def test_what_is_no_run_is_refused(raw: str | bytes) -> None:
    with pytest.raises(ParseError):
        nccl_tests.parse(raw)
