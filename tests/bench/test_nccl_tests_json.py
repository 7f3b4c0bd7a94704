"""Files of `nccl-tests -J`: ranks of each process, several reports in one file, sizes and validation not shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainmaster.bench import nccl_tests
from trainmaster.core.results import CheckResult, Overall, judge_overall

MIB = 1 << 20
FLOOR = 100.0


def report(
    collective: str = "all_reduce", *, processes: int = 8, gpus: int = 1, nodes: int = 1, met: int | None = None
) -> dict[str, Any]:
    """A healthy report of `processes` × `gpus` ranks, of which `met` took part."""
    ranks = met or processes * gpus
    factor = (ranks - 1) / ranks * (2 if collective == "all_reduce" else 1)
    rows = []
    for size in (MIB, 2 * MIB, 4 * MIB):
        side = {"time": size / 120e3, "alg_bw": 120.0, "bus_bw": round(120.0 * factor, 6), "nwrong": 0.0}
        rows.append(
            {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1",
             "out_of_place": dict(side), "in_place": dict(side)}
        )  # fmt: skip
    per_node = max(1, processes // nodes)
    devices = [
        {"rank": number * gpus, "group": 0, "pid": 1000 + 50 * number, "hostname": f"node{number // per_node}",
         "device": number % per_node * gpus, "device_hex": f"0000:{16 + number % per_node:02x}:00",
         "device_info": "NVIDIA H200"}
        for number in range(processes)
    ]  # fmt: skip
    return {
        "version": 3,
        "args": [f"/opt/nccl-tests/build/{collective}_perf", "-J", "out.json"],
        "config": {"nthreads": 1, "ngpus": gpus, "minimum_bytes": MIB, "maximum_bytes": 4 * MIB, "step_factor": 2,
                   "validation": 1, "devices": devices},
        "results": rows,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": round(120.0 * factor, 4), "okay": "unchecked"},
        "errors": [],
        "end_time": "2026-01-05 10:00:00",
    }  # fmt: skip


def judge(document: Any, **asked: Any) -> CheckResult:
    text = document if isinstance(document, str) else json.dumps(document)
    return nccl_tests.judge(text, least_gbps=FLOOR, **asked)


def overall(result: CheckResult) -> Overall:
    return judge_overall([result], planned=[nccl_tests.CHECK])


def reasons(result: CheckResult) -> str:
    return "\n".join(f"{finding.verdict} {finding.reason}" for finding in result.findings)


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "gpus", "nodes"), [(8, 1, 1), (1, 8, 1), (2, 8, 2), (4, 2, 1), (16, 1, 2)])
@pytest.mark.parametrize("stated", [True, False])
def test_the_ranks_of_each_process_are_counted(processes: int, gpus: int, nodes: int, stated: bool) -> None:
    result = judge(report(processes=processes, gpus=gpus, nodes=nodes), ranks=processes * gpus if stated else None)
    assert overall(result) is Overall.PASS, reasons(result)
    assert f"{processes * gpus} ranks on {nodes} nodes met" in reasons(result)


def test_processes_that_did_not_meet_fail() -> None:
    result = judge(report(processes=2, gpus=8, nodes=2, met=8), ranks=16)
    assert overall(result) is Overall.FAIL, reasons(result)


@pytest.mark.parametrize("lost", ["nthreads", "ngpus"])
def test_a_report_that_lost_the_number_of_gpus_is_incomplete(lost: str) -> None:
    document = report(processes=1, gpus=8)
    del document["config"][lost]
    assert overall(judge(document, ranks=8)) is Overall.INCOMPLETE


def test_a_report_that_lost_a_process_is_incomplete() -> None:
    document = report(processes=2, gpus=4)
    del document["config"]["devices"][0]
    assert overall(judge(document)) is Overall.INCOMPLETE


# --- several reports in one file ------------------------------------------------------------------------------------


def later(document: dict[str, Any]) -> dict[str, Any]:
    for device in document["config"]["devices"]:
        device["pid"] += 5000
    return document


def joined(*documents: dict[str, Any]) -> list[str]:
    texts = [json.dumps(document, indent=1) for document in documents]
    return ["\n".join(texts), "".join(texts), f"[{','.join(texts)}]"]


@pytest.mark.parametrize("form", [0, 1, 2], ids=["lines", "no gap", "list"])
def test_two_collectives_in_one_file_are_two_runs(form: int) -> None:
    result = judge(joined(report(), later(report("all_gather")))[form], ranks=8)
    assert overall(result) is Overall.PASS, reasons(result)
    assert "all_gather: " in reasons(result) and "all_reduce: " in reasons(result)


@pytest.mark.parametrize("form", [0, 1, 2], ids=["lines", "no gap", "list"])
@pytest.mark.parametrize("bad", [0, 1])
def test_each_of_two_reports_is_judged(form: int, bad: int) -> None:
    both = [report(), later(report("all_gather"))]
    both[bad]["results"][2]["in_place"]["nwrong"] = 3.0
    assert overall(judge(joined(*both)[form], ranks=8)) is Overall.FAIL


def test_a_second_report_that_was_cut_is_no_pass() -> None:
    whole = joined(report(), later(report("all_gather")))[0]
    for cut in (10, 400, len(whole) // 2 - 300, len(whole) // 2 + 300):
        assert overall(judge(whole[:-cut], ranks=8)) is Overall.INCOMPLETE


# --- sizes and validation --------------------------------------------------------------------------------------------


def test_a_lost_size_is_incomplete_although_the_number_of_rows_is_right() -> None:
    document = report()
    document["results"][2] = document["results"][0]
    result = judge(document, ranks=8)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert "4194304 bytes was not measured" in reasons(result)


def test_sizes_that_the_tool_rounds_down_are_the_sizes_asked_for() -> None:
    document = report("all_gather")
    document["config"]["minimum_bytes"], document["config"]["maximum_bytes"] = MIB + 40, 4 * MIB + 160
    assert overall(judge(document, ranks=8)) is Overall.INCOMPLETE, "160 bytes are more than the tool takes away"
    document["config"]["minimum_bytes"], document["config"]["maximum_bytes"] = MIB + 20, 4 * MIB + 80
    assert overall(judge(document, ranks=8)) is Overall.PASS


@pytest.mark.parametrize("validation", [1, None])
@pytest.mark.parametrize("row", [None, 2])
def test_values_that_were_not_verified_are_incomplete(validation: int | None, row: int | None) -> None:
    document = report()
    document["config"]["validation"] = validation
    for number, one in enumerate(document["results"]):
        if row in (None, number):
            one["in_place"]["nwrong"] = one["out_of_place"]["nwrong"] = None
    result = judge(document, ranks=8)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
