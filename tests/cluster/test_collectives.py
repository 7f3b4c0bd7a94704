"""Who takes part in the collectives of a cluster, what each rank is told, and who is named when nobody reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from trainmaster.checks import profiles
from trainmaster.cluster.collectives import findings as collective_findings
from trainmaster.cluster.collectives import plan as collective_plan
from trainmaster.cluster.collectives.launch import Capabilities
from trainmaster.cluster.health import check
from trainmaster.core.errors import NodeUnavailable, UsageError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Finding, Overall, Verdict, error, fail, ok
from trainmaster.node.ranks import detect
from trainmaster.targets import Node, Result

ROW = {
    "seq": 0, "collective": "all_reduce", "size_bytes": 1024, "ranks": 2, "heard": [0, 1], "repeats": 5, "time_us": 9.0,
    "algbw_gbps": 1.0, "busbw_gbps": 1.5, "median_us": 8.0, "p95_us": 9.5, "slowest_rank": 0, "wrong": [],
}  # fmt: skip


def node(name: str, *, expect: dict[str, Any] | None = None, **found: Finding) -> NodeHealth:
    results = [CheckResult(check=check, findings=(finding,), took_s=0.0) for check, finding in found.items()]
    return NodeHealth(node=name, level=2, planned=tuple(found), results=tuple(results), expect=expect or {})


def seat(gpus: int = 0, torch: str | None = "2.11") -> Capabilities:
    why = "" if torch else "torch is not installed"
    return Capabilities(host="x", address="10.0.0.9", ports=(20_001,), torch=torch, gpus=gpus, why=why)


def plan(
    seats: dict[str, Capabilities | NodeUnavailable], *, level: int = 2, **expect: object
) -> tuple[collective_plan.Plan | None, list[Finding]]:
    nodes = [node(name, expect=expect) for name in seats]
    hosts = {name: Node(name=name, address=None) for name in seats}
    return collective_plan.plan(nodes, seats, hosts, level=level, total_s=600)


def made(seats: dict[str, Capabilities | NodeUnavailable], **expect: object) -> collective_plan.Plan:
    found, _ = plan(seats, **expect)
    assert found is not None
    return found


def ran(code: int | None = 0, *, state: str | None = None, out: str = "", err: str = "") -> list[Result]:
    return [Result(code=code, state=state, out=out, err=err)]


def test_silent_and_sick_nodes_are_left_out_by_name() -> None:
    nodes = (
        node("well", gpu_count=ok("8")),
        node("sick", gpu_ecc=fail("one", action="replace it")),
        node("unknown", cuda_init=error("hangs", action="reboot")),
        node("slow-disk", disk_io=fail("slow", action="look"), dcgm=error("no daemon", action="start it")),
    )
    silent = Silent(node="gone", verdict=Verdict.ERROR, reason="nothing listens", action="look")
    health = ClusterHealth(asked=("well", "sick", "unknown", "slow-disk", "gone"), nodes=nodes, silent=(silent,))
    fit, out = collective_plan.choose(health)
    assert [one.node for one in fit] == ["well", "slow-disk"]
    assert {finding.device: finding.verdict for finding in out} == dict.fromkeys(("gone", "sick", "unknown"), "skip")
    assert "gpu_ecc (fail)" in next(finding.reason for finding in out if finding.device == "sick")


@pytest.mark.parametrize("name", ["dcgm_extended", "nccl", "dcgm", "xid", "gpu_ecc"])
def test_a_node_that_failed_a_check_of_its_gpus_is_left_out(name: str) -> None:
    nodes = (node("well", gpu_count=ok("8")), node("sick", **{name: fail("it fails", action="replace it")}))
    fit, out = collective_plan.choose(ClusterHealth(asked=("well", "sick"), nodes=nodes))
    assert ([one.node for one in fit], [finding.device for finding in out]) == (["well"], ["sick"])


def test_every_rank_is_told_its_place_as_torchrun_does() -> None:
    run = made({"a": seat(gpus=2), "b": seat(gpus=2)}, efa_devices=32, busbw_gbps=300)
    places = [detect(one.env) for number in range(2) for one in run.programs(number)]
    assert [(p.rank, p.local_rank, p.node_rank, p.nodes, p.world_size) for p in places] == [
        (0, 0, 0, 2, 4), (1, 1, 0, 2, 4), (2, 0, 1, 2, 4), (3, 1, 1, 2, 4)
    ]  # fmt: skip
    assert {(p.master_addr, p.master_port) for p in places} == {("10.0.0.9", 20_001)}
    text = " ".join(run.words)
    for words in ("--backend nccl", "--collective all_reduce", "--expect-transport EFA", "--min-busbw 300"):
        assert words in text
    assert [run.node_of(rank) for rank in range(4)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("seats", "expect", "verdicts", "words"),
    [
        ({"a": seat(), "b": seat(torch=None)}, {}, ["skip", "skip"], "torch is not installed on b"),
        (
            {"a": seat(), "b": seat(torch=None)},
            {"collectives": True},
            ["error", "error"],
            "torch is not installed on b",
        ),
        ({"a": seat(1), "b": seat(0)}, {}, ["error", "skip"], "its torch sees no GPU"),
        ({"a": seat(0), "b": seat(0)}, {"gpus": 8}, ["error"] * 3, "its torch sees no GPU"),
        ({"a": seat()}, {}, ["skip"], "only a can take part"),
        ({"a": seat(), "b": NodeUnavailable("it hangs", action="look")}, {}, ["error", "skip"], "it hangs"),
        ({}, {}, ["skip"], "no node can take part"),
    ],
)
def test_what_cannot_run_says_why(
    seats: dict[str, Capabilities | NodeUnavailable], expect: dict[str, object], verdicts: list[str], words: str
) -> None:
    run, found = plan(seats, **expect)
    assert run is None
    assert [finding.verdict for finding in found] == verdicts
    assert any(words in finding.reason for finding in found)


def test_gpus_that_take_no_part_are_not_measured() -> None:
    run, found = plan({"a": seat(gpus=8), "b": seat(gpus=7), "c": seat(gpus=8)})
    assert run is not None and run.world == 21
    assert [(finding.verdict, finding.device) for finding in found] == [("error", "b")]
    assert "2 GPUs take no part" in found[0].reason
    assert plan({"a": seat(gpus=8), "b": seat(gpus=8)})[1] == []


def test_collectives_of_nodes_that_list_gpus_are_required() -> None:
    nodes = [node(name, gpu_count=ok("8 of 8", listed=8)) for name in ("a", "b")]
    hosts = {one.node: Node(name=one.node) for one in nodes}
    _, found = collective_plan.plan(nodes, {"a": seat(8), "b": seat(torch=None)}, hosts, level=2, total_s=600)
    assert [(finding.verdict, finding.device) for finding in found] == [("error", "b")]


def test_one_node_with_two_gpus_is_enough() -> None:
    assert made({"a": seat(gpus=2)}).world == 2


@pytest.mark.parametrize(
    ("outcomes", "named", "words"),
    [
        ([ran(-9, out=json.dumps({"row": ROW})), ran(1)], "a", "killed by signal 9"),
        ([ran(None, state="T"), None], "a", "is stopped"),
        ([NodeUnavailable("the connection was lost", action="look"), ran(1)], "a", "connection was lost"),
        ([ran(1, err="Timed out"), ran(None, state="T")], "b", "rank 1 on b: its process is stopped"),
        ([ran(1, err="Timed out"), ran(-6, err="dragged")], None, "rank 0 printed: Timed out (ended with 1)"),
        ([ran(0, out='{"report": {"v": 1}}'), ran(0)], None, "gave no report"),
    ],
)
def test_without_a_report_the_nodes_own_words_say_who_stopped(
    outcomes: Sequence[Any], named: str | None, words: str
) -> None:
    run = made({"a": seat(), "b": seat()})
    found = collective_findings.judge(run, outcomes)
    bad = [finding for finding in found if finding.verdict is not Verdict.SKIP]
    assert [(finding.device, str(finding.verdict)) for finding in bad] == [(named, "fail" if named else "error")]
    assert words in bad[0].reason
    kept = [finding.values["busbw_gbps"] for finding in found if finding.verdict is Verdict.SKIP]
    assert kept == ([{"1024": 1.5}] if words == "killed by signal 9" else [])


@pytest.mark.parametrize(
    ("level", "only", "skip", "names", "together"),
    [
        (1, ["cpu"], [], ("cpu",), False),
        (2, ["cpu", "collectives"], [], ("cpu",), True),
        (2, ["collectives"], [], ("gpu_count", "hostname"), True),
        (2, ["cpu"], ["collectives"], ("cpu",), False),
    ],
)
def test_collectives_are_planned_like_any_other_check(
    level: int, only: list[str], skip: list[str], names: tuple[str, ...], together: bool
) -> None:
    planned = check.plan(level, only, skip)
    assert planned == check.ClusterPlan(level=level, names=names, collectives=together, whole=False)


def test_an_expectation_that_no_node_measures_makes_a_cluster_incomplete() -> None:
    good = CheckResult(check="cpu", findings=(ok("8 CPUs"),), took_s=0.0)
    nodes = tuple(NodeHealth(node=name, level=1, planned=("cpu",), results=(good,)) for name in "ab")
    health = ClusterHealth(asked=("a", "b"), nodes=nodes)
    assert check.add_unmeasured(health, profiles.resolve(["H200"]), check.plan(1)).overall is Overall.PASS
    for word in ("gemm_tflops=700", "dcgm=true", "busbw_gbps=100"):
        left = check.add_unmeasured(health, profiles.resolve([word]), check.plan(1))
        assert left.overall is Overall.INCOMPLETE


def test_collectives_run_by_default_at_level_2() -> None:
    assert check.plan(2).collectives
    assert not check.plan(1).collectives
    assert not check.plan(2, skip=["collectives"]).collectives
    with pytest.raises(UsageError, match="collectives needs --level 2"):
        check.plan(1, ["collectives"])
