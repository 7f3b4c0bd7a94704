"""Acceptance over nodes: programs of the ranks, ranks that ended badly, and golden runs of this site."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.bench.accept.baselines import append, golden_of
from trainmaster.bench.accept.options import Options
from trainmaster.cluster.acceptance.judge import judge_outcomes
from trainmaster.cluster.acceptance.run import _missing, plan
from trainmaster.cluster.collectives.launch import Capabilities
from trainmaster.core.errors import NodeUnavailable
from trainmaster.targets import Node, Result, find_unequal

NODES = [Node(name="a"), Node(name="b")]
OPTIONS = Options(model="resnet18", batch_size=4, baselines="/nowhere/site.toml", log_dir="logs")
OPTIONS_HERE = Options(model="resnet18", batch_size=4)


def offer(gpus: int) -> Capabilities:
    return Capabilities(host="h", address="10.0.0.1", ports=(20_001,), torch="2.13", gpus=gpus, why="")


@pytest.mark.parametrize(("gpus", "ranks"), [((8, 8), 8), ((8, 4), 4), ((0, 0), 1)])
def test_every_node_gets_as_many_ranks(gpus: tuple[int, int], ranks: int) -> None:
    jobs = plan(NODES, {"a": offer(gpus[0]), "b": offer(gpus[1])}, OPTIONS)
    assert [len(programs) for _, programs in jobs] == [ranks, ranks]
    last = jobs[1][1][-1]
    assert last.env["RANK"] == str(2 * ranks - 1)
    assert (last.env["LOCAL_RANK"], last.env["GROUP_RANK"], last.env["MASTER_PORT"]) == (str(ranks - 1), "1", "20001")
    assert list(last.words) == ["--model", "resnet18", "--batch-size", "4", "--out", "-"]


@pytest.mark.parametrize(("backend", "fault"), [(None, True), ("nccl", True), ("gloo", False)])
def test_a_node_with_gpus_that_torch_does_not_see_is_named(backend: Any, fault: bool) -> None:
    blind = replace(offer(0), devices=8)
    missing = _missing({"gpu-01": blind, "gpu-02": blind}, replace(OPTIONS, backend=backend))
    assert list(missing) == (["gpu-01", "gpu-02"] if fault else [])
    assert not fault or missing["gpu-01"][0] == "its torch sees no GPU, though the node has 8"
    assert _missing({"cpu": offer(0)}, OPTIONS) == {}


def test_ranks_are_told_the_names_of_the_hosts_file() -> None:
    jobs = plan(NODES, {"a": offer(1), "b": offer(1)}, OPTIONS)
    assert [programs[0].env["TRAINMASTER_NODE_NAME"] for _, programs in jobs] == ["a", "b"]


def ran(code: int | None, *, out: str = "", err: str = "") -> Result:
    return Result(code=code, state=None, out=out, err=err)


def test_a_rank_that_ended_badly_is_named_and_not_its_peers() -> None:
    outcomes = [[ran(1, err="RuntimeError: Connection closed by peer")], [ran(-9, err="out of memory")]]
    document = judge_outcomes(OPTIONS, ["a", "b"], outcomes, per_node=1)
    assert document["overall"] == "FAIL"
    (finding,) = document["checks"][0]["findings"]
    assert (finding["device"], finding["reason"]) == ("rank1", "rank 1 on b ended with -9: out of memory")


def test_a_node_that_was_lost_is_no_pass() -> None:
    outcomes = [NodeUnavailable("it hangs", action="look"), None]
    document = judge_outcomes(OPTIONS, ["a", "b"], outcomes, per_node=1)
    assert document["overall"] == "INCOMPLETE"


@pytest.mark.parametrize(
    "changes", [{"world_size": 1}, {"world_size": 4}, {"world_size": None}, {"exit_code": 1, "overall": "FAIL"}]
)
def test_a_result_of_other_ranks_than_were_started_is_no_pass(changes: dict[str, Any]) -> None:
    """Two ranks that each take themselves for the whole run print a result of one rank each."""
    good = {**results(), "world_size": 2, "overall": "PASS", "exit_code": 0}
    assert (
        judge_outcomes(OPTIONS_HERE, ["a", "b"], [[ran(0, out=json.dumps(good))]] * 2, per_node=1)["overall"] == "PASS"
    )
    alone = {**good, **changes}
    found = judge_outcomes(OPTIONS_HERE, ["a", "b"], [[ran(0, out=json.dumps(alone))]] * 2, per_node=1)
    assert found["overall"] == "INCOMPLETE"


def test_data_that_is_not_there_is_no_fault_of_the_machine() -> None:
    outcome = [ran(3, err="error cannot use the data: data/cifar-10-python.tar.gz: not there")]
    found = judge_outcomes(OPTIONS, ["a"], [outcome], per_node=1)
    assert found["overall"] == "INCOMPLETE"
    assert "bring the data" in found["checks"][0]["findings"][0]["action"]


def test_a_node_with_fewer_gpus_is_named() -> None:
    """With four ranks on each, four GPUs of the first node would pass unmeasured."""
    assert set(find_unequal({"a": 8, "b": 4, "c": 8})) == {"b"}
    assert find_unequal({"a": 8, "b": 8}) == {}


def test_a_run_over_nodes_is_compared_with_the_golden_run_of_this_site(tmp_path: Path) -> None:
    good = results()
    append(tmp_path / "site.toml", golden_of(good, name="first"))
    options = Options(model="resnet18", batch_size=4, baselines=str(tmp_path / "site.toml"))
    same = judge_outcomes(options, ["a"], [[ran(3, out=json.dumps(good))]], per_node=1)
    assert same["overall"] == "PASS"
    assert same["baseline"]["source"].startswith("golden run first")
    slow = {**good, "throughput_samples_per_second": 30.0}
    found = judge_outcomes(options, ["a"], [[ran(3, out=json.dumps(slow))]], per_node=1)
    assert found["overall"] == "FAIL"
    (regression,) = (one for one in found["checks"] if one["check"] == "accept_regression")
    assert regression["findings"][0]["reason"].startswith("throughput is 25% worse than in the golden run first")


def results() -> dict[str, Any]:
    """A results.json without a baseline, as a node prints it."""
    options = {
        "model": "resnet18", "data_mode": "synthetic", "image_size": None, "batch_size": 4, "accumulate": 1,
        "num_classes": 1000, "layers": 12, "width": 768, "heads": 12, "sequence": 512,
    }  # fmt: skip
    times = {"p50": 0.1, "p95": 0.1, "p99": 0.1, "max": 0.1}
    names = "ranks parameters gradients loss stragglers throughput regression".split()

    def finding(verdict: str) -> dict[str, Any]:
        return {"verdict": verdict, "reason": "x", "action": "y", "device": None, "values": {}, "proof": None}

    return {
        "v": 1, "overall": "INCOMPLETE", "exit_code": 3, "finished_at": "2026-01-01T00:00:00+00:00", "options": options,
        "device": "cpu", "precision": "fp32", "world_size": 1, "nodes": 1, "backend": "gloo",
        "throughput_samples_per_second": 40.0, "scaling_efficiency": None, "baseline": None,
        "ranks": [{"rank": 0, "gpu": None, "host": "a", "step_s": times, "alone_s": times}],
        "checks": [
            {"check": f"accept_{name}", "findings": [finding(verdict)], "took_s": 0.0}
            for name in names for verdict in ["error" if name == "throughput" else "pass"]
        ],
    }  # fmt: skip
