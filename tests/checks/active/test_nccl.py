"""The check `nccl`: real runs with gloo on CPUs, reports of GPUs as a test wants, and machines without GPUs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import gpu_faults
import pytest

from machines import Machine
from trainmaster.checks.active import nccl
from trainmaster.core.errors import CommandTimedOut
from trainmaster.core.expect import Expect
from trainmaster.core.node_links import Link, find_node_link
from trainmaster.core.results import Finding, Verdict
from trainmaster.node.host import CommandResult, Host

SLOW_LINK = Link(kind="pcie", gbps=0.2, words="a link of 0.2 GB/s")
NVLINK = find_node_link("H200")
HERE = Path(nccl.__file__).parents[3]


def ran(stdout: str, *, exit_code: int = 0, stderr: str = "") -> CommandResult:
    return CommandResult(argv=("python",), exit_code=exit_code, stdout=stdout, stderr=stderr, took_s=1.0)


def report(ranks: int = 8, gbps: float = 380.0, **changes: Any) -> dict[str, Any]:
    """The report of a healthy run over H200s."""
    rows = [
        {"collective": "all_reduce", "size_bytes": size, "heard": list(range(ranks)), "busbw_gbps": rate, "wrong": []}
        for size, rate in ((16 << 20, gbps * 0.6), (128 << 20, gbps * 0.9), (1 << 30, gbps))
    ]
    finding = {"verdict": "pass", "reason": "fine", "action": None, "device": None, "values": {}, "proof": None}
    names = ("collective_ranks", "collective_data", "collective_transport", "collective_bandwidth")
    results = [{"check": name, "findings": [dict(finding)], "took_s": 0.0} for name in names]
    return {
        "v": 1, "backend": "nccl", "world": ranks, "nodes": 1, "rows": rows, "partial": [], "lost": [],
        "sweep": {"min_bytes": 16 << 20, "max_bytes": 1 << 30, "factor": 8}, "notes": [],
        "members": [{"rank": rank} for rank in range(ranks)], "results": results, "transport": "P2P/CUMEM", **changes,
    }  # fmt: skip


def text(document: dict[str, Any]) -> str:
    return f'{{"row": {{}}}}\n{json.dumps({"report": document})}\n'


def judge(document: dict[str, Any], *, ranks: int = 8, link: Link | None = NVLINK) -> list[Finding]:
    return nccl.judge_answer(ran(text(document)), ranks=ranks, link=link)


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.spawns
@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_path_runs_on_cpus(ranks: int) -> None:
    answer = nccl.run_collectives(Host(), ranks, backend="gloo", largest="1M")
    (found,) = nccl.judge_answer(answer, ranks=ranks, link=None, backend="gloo")
    if ranks == 1:
        assert found.verdict is Verdict.PASS and "without a peer" in found.reason
    else:
        assert found.verdict is Verdict.WARN, found.reason  # measured, and nothing to compare it with
        assert found.values["ranks"] == ranks and found.values["busbw_gbps"] > 0


@pytest.mark.matrix(one_in=2, of="the check nccl with processes")
@pytest.mark.slow
@pytest.mark.spawns
def test_a_launchers_variables_do_not_make_it_a_rank_of_that_launcher() -> None:
    host = Host({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"})
    answer = nccl.run_collectives(host, 2, backend="gloo", largest="1M")
    (found,) = nccl.judge_answer(answer, ranks=2, link=SLOW_LINK, backend="gloo")
    assert found.values["ranks"] == 2, found.reason


@pytest.mark.matrix(one_in=2, of="the check nccl with processes")
@pytest.mark.slow
@pytest.mark.spawns
def test_without_torch_it_is_an_error_with_the_command_that_mends_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    answer = nccl.run_collectives(Host({"PYTHONPATH": path}), 2, backend="gloo", largest="1M")
    (found,) = nccl.judge_answer(answer, ranks=2, link=None, backend="gloo")
    assert found.verdict is Verdict.ERROR and "[train]" in f"{found.reason} {found.action}"


@pytest.mark.matrix(one_in=2, of="the check nccl with processes")
@pytest.mark.slow
@pytest.mark.spawns
def test_no_gpu_for_nccl_is_an_error() -> None:
    answer = nccl.run_collectives(Host({"CUDA_VISIBLE_DEVICES": ""}), 2)
    (found,) = nccl.judge_answer(answer, ranks=2, link=None)
    assert found.verdict is Verdict.ERROR and "torch sees no GPU" in found.reason


# --- the bandwidth ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gbps", "verdict"),
    [(470.0, "pass"), (380.0, "pass"), (200.0, "warn"), (100.0, "fail"), (4.0, "fail"), (900.0, "error")],
)
def test_the_bandwidth_is_held_against_the_links(gbps: float, verdict: str) -> None:
    (found,) = judge(report(gbps=gbps))
    assert found.verdict == verdict, found.reason
    assert "NVLinks of H200" in found.reason
    assert [point["size_bytes"] for point in found.values["points"]] == [16 << 20, 128 << 20, 1 << 30]


@pytest.mark.parametrize(("gbps", "verdict"), [(470.0, "pass"), (400.0, "warn"), (380.0, "fail")])
def test_a_published_baseline_comes_before_the_links(gbps: float, verdict: str) -> None:
    document = report(gbps=gbps)
    base = {"size_bytes": 1 << 30, "baseline_gbps": 480.0, "kind": "measured", "source": "a source"}
    document["results"][3]["findings"][0]["values"] = {"compared": [base]}
    (found,) = judge(document)
    assert found.verdict == verdict, found.reason


def test_a_model_that_nothing_is_known_of_is_measured_and_warned_about() -> None:
    (found,) = judge(report(), link=None)
    assert found.verdict is Verdict.WARN and "not compared" in found.reason


def test_sockets_inside_the_node_are_warned_about() -> None:
    document = report()
    document["results"][2]["findings"][0] |= {"verdict": "warn", "reason": "TCP sockets carried the traffic"}
    assert [finding.verdict for finding in judge(document)] == [Verdict.PASS, Verdict.WARN]


# --- evidence against the run ----------------------------------------------------------------------------------------


def wrong_data(document: dict[str, Any]) -> None:
    document["rows"][1]["wrong"] = [
        {"rank": 3, "index": 0, "expected": 1, "got": 2, "count": 5, "when": "before timing"}
    ]


def lost_rank(document: dict[str, Any]) -> None:
    document["lost"] = [{"rank": 3, "reason": "rank 3 was killed by signal 9 (SIGKILL)"}]


@pytest.mark.parametrize("spoil", [wrong_data, lost_rank])
@pytest.mark.parametrize("ranks", [1, 8])
def test_wrong_data_and_lost_ranks_fail(spoil: Any, ranks: int) -> None:
    document = report(ranks)
    spoil(document)
    assert [finding.verdict for finding in judge(document, ranks=ranks)] == [Verdict.FAIL]


DAMAGE = {
    "empty": lambda whole: "",
    "cut": lambda whole: whole[: len(whole) // 2],
    "no report": lambda whole: whole.split("\n")[0],
    "two reports": lambda whole: whole + whole,
    "N/A": lambda whole: whole.replace("380.0", '"N/A"'),
    "null": lambda whole: whole.replace('"rows": [', '"rows": null, "other": ['),
    "another backend": lambda whole: whole.replace('"nccl"', '"gloo"'),
    "seven ranks": lambda whole: whole.replace('"world": 8', '"world": 7'),
    "no rank finished": lambda whole: whole.replace("[0, 1, 2, 3, 4, 5, 6, 7]", "[0]"),
    "the largest size lost": lambda whole: whole.replace(str(1 << 30), str(16 << 20), 1),
    "another collective": lambda whole: whole.replace('"all_reduce"', '"all_gather"', 1),
    "no findings": lambda whole: whole.replace("collective_ranks", "other"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_report_is_an_error(how: str) -> None:
    whole = text(report())
    damaged = DAMAGE[how](whole)
    assert damaged != whole
    (found,) = nccl.judge_answer(ran(damaged), ranks=8, link=NVLINK)
    assert found.verdict is Verdict.ERROR, found.reason


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_that_is_missing_is_an_error_unless_memory_was_short(row: int) -> None:
    document = report()
    del document["rows"][row]
    assert [finding.verdict for finding in judge(document)] == [Verdict.ERROR]
    document["notes"] = ["1 GiB does not fit"]
    assert [finding.verdict for finding in judge(document)] == [Verdict.PASS if row == 2 else Verdict.ERROR]


def test_a_run_that_hung_or_crashed_is_an_error() -> None:
    for answer in (CommandTimedOut("no end in 140 s"), ran("", exit_code=-11, stderr="Segmentation fault"), None):
        (found,) = nccl.judge_answer(answer, ranks=8, link=NVLINK)
        assert found.verdict is Verdict.ERROR


# --- machines --------------------------------------------------------------------------------------------------------


def put(machine: Machine, ranks: int, document: dict[str, Any]) -> None:
    machine.command(shlex.join(nccl.command(ranks)), text(document))


def test_eight_gpus_are_joined_by_eight_ranks(machine: Machine) -> None:
    gpu_faults.make(machine)
    put(machine, 8, report())
    (found,) = nccl.judge(nccl.read(machine.host), Expect())
    assert found.verdict is Verdict.PASS and found.values["ranks"] == 8


def test_a_gpu_that_is_missing_is_reported_beside_the_others(machine: Machine) -> None:
    gpu_faults.make(machine, drop=3)
    put(machine, 7, report(7))
    verdicts = [finding.verdict for finding in nccl.judge(nccl.read(machine.host), Expect())]
    assert Verdict.PASS in verdicts and Verdict.ERROR in verdicts


def test_hidden_gpus_are_skipped_with_proof(machine: Machine) -> None:
    gpu_faults.make(machine)
    machine.answer("env", "CUDA_VISIBLE_DEVICES", "0,1")
    put(machine, 2, report(2))
    found = nccl.judge(nccl.read(machine.host), Expect())
    assert sorted(str(finding.verdict) for finding in found) == ["pass"] + ["skip"] * 6
    assert all(finding.proof for finding in found if finding.verdict is Verdict.SKIP)


def test_mig_is_skipped_with_proof(machine: Machine) -> None:
    gpu_faults.make(machine)
    machine.edit(None, {"mig_mode/current_mig": "Enabled"})
    (found,) = nccl.judge(nccl.read(machine.host), Expect())
    assert found.verdict is Verdict.SKIP and found.proof


def test_a_machine_without_gpus_is_skipped_with_proof(machine: Machine) -> None:
    from nodes import no_gpus

    no_gpus(machine)
    (found,) = nccl.judge(nccl.read(machine.host), Expect())
    assert found.verdict is Verdict.SKIP and found.proof
    (found,) = nccl.judge(nccl.read(machine.host), Expect(gpus=8))
    assert found.verdict is Verdict.FAIL


def test_the_command_is_the_same_on_every_machine() -> None:
    assert nccl.command(8)[0] == "python" and sys.executable not in nccl.command(8)
