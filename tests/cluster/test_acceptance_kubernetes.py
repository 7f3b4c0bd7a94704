"""Nodes of a Kubernetes cluster that take part in an acceptance run, and the objects of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainmaster.bench.accept.options import Options
from trainmaster.cluster.acceptance.judge import judge_job
from trainmaster.cluster.acceptance.run import make_job
from trainmaster.cluster.health.gather import compare_offer
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.plan import ExitRecord
from trainmaster.core.results import CheckResult, Finding, Verdict, ok, skip
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import Poll
from trainmaster.targets._runs import Owner
from trainmaster.targets._submission_run import judge_end
from trainmaster.targets.kubernetes.cluster_job import KubeClusterJob, find_missing
from trainmaster.targets.kubernetes.node_list import NO_GPU, find_nodes
from trainmaster.targets.kubernetes.nodes import plan_pod
from trainmaster.targets.kubernetes.settings import Settings, Toleration
from trainmaster.targets.kubernetes.target import Kubernetes

OPTIONS, SETTINGS = Options(), Settings(image="registry/a:1")


def node(name: str, *, gpus: int = 8, working: int | None = None, ready: bool = True, **spec: Any) -> dict[str, Any]:
    amounts = {"capacity": gpus, "allocatable": gpus if working is None else working}
    return {
        "metadata": {"name": name, "labels": {"pool": name[0]}},
        "spec": spec,
        "status": {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            **{key: {"nvidia.com/gpu": str(count)} for key, count in amounts.items() if gpus},
        },
    }


def missing(listed: list[dict[str, Any]], settings: Settings = SETTINGS, options: Options = OPTIONS) -> dict[str, str]:
    found = find_missing(find_nodes(listed, settings, without_gpus=options.backend == "gloo"), make_job(options))
    return {name: reason for name, (reason, _) in found.items()}


GOOD = [node("a1"), node("a2")]


def test_nodes_without_gpus_and_those_left_out_are_not_measured() -> None:
    listed = [
        *GOOD,
        node("head", gpus=0, taints=[{"key": "control-plane", "effect": "NoSchedule"}]),
        node("b1", gpus=4),
    ]
    assert missing([*GOOD, listed[2]]) == {}
    assert set(missing(listed)) == {"b1"}
    assert missing(listed, Settings(not_nodes=("b1",))) == {}
    assert [one.name for one in find_nodes(listed, Settings(node_labels={"pool": "b"}))] == ["b1"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (node("x", ready=False), "it is not Ready"),
        (node("x", unschedulable=True), "it is cordoned"),
        (node("x", taints=[{"key": "sick", "effect": "NoSchedule"}]), "no toleration for its taint sick"),
        (node("x", working=7), "7 of its 8 GPUs are in working order"),
        (node("x", gpus=4), "4 GPUs, while other nodes have 8"),
    ],
)
def test_a_node_that_cannot_be_measured_whole_is_named(bad: dict[str, Any], why: str) -> None:
    assert missing([*GOOD, bad]) == {"x": why}


def test_taints_that_pods_tolerate_are_no_reason() -> None:
    tainted = node(
        "x", taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {"key": "mine", "effect": "NoExecute"}]
    )
    assert missing([tainted], Settings(tolerations=(Toleration(key="mine"),))) == {}


def test_a_node_that_just_became_ready_takes_part() -> None:
    """The cluster takes the taint away some seconds after the condition."""
    assert missing([node("x", taints=[{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}])]) == {}


def test_a_cluster_without_nodes_is_no_pass() -> None:
    assert "no node" in missing([])["cluster"]


def test_every_node_gets_a_pod_and_every_gpu_a_rank(tmp_path: Path) -> None:
    nodes, job = find_nodes(GOOD, SETTINGS), make_job(Options(batch_size=64))
    planned = KubeClusterJob(Kubernetes(None), SETTINGS, nodes, job, home=tmp_path, folder=tmp_path)
    assert (planned.world, planned.missing) == (16, {})
    text = planned.render()
    job = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Job")
    assert job["spec"]["completions"] == 2
    assert job["metadata"]["labels"]["app"] == "gpu-acceptance-test"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] in (8, "8")
    assert "--batch-size" in text


@pytest.mark.parametrize(
    ("poll", "verdict"),
    [
        (Poll(state=TargetState.WAITING, note="no room"), Verdict.ERROR),
        (Poll(state=TargetState.UNKNOWN, note="refused"), Verdict.ERROR),
        (Poll(state=TargetState.LOST, note="node gone"), Verdict.ERROR),
        (Poll(state=TargetState.SUCCEEDED), Verdict.ERROR),
        (Poll(state=TargetState.FAILED, note="image"), Verdict.ERROR),
        (
            Poll(
                state=TargetState.FAILED,
                exit=ExitRecord(
                    attempt="a", ok=False, ended_at="", reason=Reason.SCRIPT_FAILED, message="rank 1 ended with 9",
                    exit_codes={"0": 0, "1": 9},
                ),
            ),
            Verdict.FAIL,
        ),
    ],
)  # fmt: skip
def test_pods_that_never_measured_accuse_no_gpu(poll: Poll, verdict: Verdict) -> None:
    document = judge_job(OPTIONS, judge_end(poll, 60, out="", code=None, action="look there"), world=2)
    ((found,),) = (one["findings"] for one in document["checks"])
    assert found["verdict"] == str(verdict)
    assert found["device"] == ("rank1" if verdict is Verdict.FAIL else None)


@pytest.mark.parametrize(
    ("bad", "closed"),
    [
        (node("a", unschedulable=True), ""),
        (node("a", taints=[{"key": "trainmaster/health", "effect": "NoSchedule"}], unschedulable=True), ""),
        (node("a", taints=[{"key": "sick", "effect": "NoSchedule"}]), "no toleration for its taint sick"),
        (node("a", ready="False"), "it is not Ready"),
        (node("a", working=0), NO_GPU),
    ],
)
def test_a_node_that_we_took_out_is_measured_and_a_foreign_taint_is_obeyed(bad: dict[str, Any], closed: str) -> None:
    (found,) = find_nodes([bad], SETTINGS)
    assert found.closed == closed


def test_a_pod_that_measures_takes_all_gpus_of_its_node_and_ends_by_itself(tmp_path: Path) -> None:
    (found,) = find_nodes([node("a", unschedulable=True)], SETTINGS)
    submission = plan_pod(SETTINGS, found, Owner(home="0" * 8, run="1" * 12), tmp_path, lasts_s=90)
    job = next(one for text in submission.files.values() for one in yaml.safe_load_all(text) if one["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/hostname": "a"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert {one["key"] for one in pod["tolerations"]} >= {"trainmaster/health", "node.kubernetes.io/unschedulable"}
    (plan_file,) = (
        one["data"]["plan.json"]
        for text in submission.files.values()
        for one in yaml.safe_load_all(text)
        if one["kind"] == "ConfigMap"
    )
    assert "time.sleep(90)" in plan_file


def without_plugin(name: str) -> dict[str, Any]:
    """A GPU node whose kubelet was restarted while its device plugin was gone."""
    amounts = {"nvidia.com/gpu": "0"}
    return {**node(name, gpus=0), "status": {**node(name)["status"], "capacity": amounts, "allocatable": amounts}}


def test_a_node_that_lost_all_its_gpus_is_named() -> None:
    listed = [*GOOD, without_plugin("a3"), node("cpu", gpus=0)]
    assert [(one.name, one.closed) for one in find_nodes(listed, SETTINGS)] == [("a1", ""), ("a2", ""), ("a3", NO_GPU)]
    assert missing(listed)["a3"] == NO_GPU
    alone = [without_plugin("a3"), node("cpu", gpus=0)]
    assert [one.name for one in find_nodes(alone, SETTINGS)] == ["a3"] and missing(alone) == {"a3": NO_GPU}
    no_gpus = Settings(image="registry/a:1", gpus=0)
    assert [one.closed for one in find_nodes(listed, no_gpus)] == ["", "", "", ""]


def test_gpus_that_the_cluster_lists_and_a_pod_does_not_find_are_no_pass() -> None:
    def counted(name: str, *findings: Finding, check: str = "gpu_count") -> NodeHealth:
        result = CheckResult(check=check, findings=findings, took_s=0.0)
        return NodeHealth(node=name, level=1, expect={}, planned=(check,), results=(result,))

    two = ok("2 of 2 GPUs")
    none = skip("no NVIDIA device", proof="PCI bus: 0 of 14 devices are 10de")

    def judge(offered: dict[str, Any], health: NodeHealth) -> list[tuple[Verdict, str | None]]:
        whole = ClusterHealth(asked=(health.node,), nodes=(health,))
        results = compare_offer([one.describe(SETTINGS) for one in find_nodes([offered], SETTINGS)], whole.nodes)
        return [(finding.verdict, finding.device) for result in results for finding in result.findings]

    assert judge(node("a", gpus=2), counted("a", two)) == [(Verdict.PASS, None)]
    assert judge(node("a", gpus=2), counted("a", none)) == [(Verdict.ERROR, "a")]
    assert judge(node("a", gpus=2, working=1), counted("a", two)) == [(Verdict.FAIL, "a")]
    assert judge(node("a", gpus=2), counted("a", two, check="shm")) == [], "GPUs were not counted"
    assert judge(node("a", gpus=0), counted("a", none)) == [], "it has none"
