"""Results between the hosts of a SageMaker job: each that was planned and is missing is an error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trainmaster.bench.collectives.result import PLANNED
from trainmaster.cluster.sagemaker.results import between, end, parse
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import CheckResult, Finding, Verdict, fail, ok
from trainmaster.core.states import TargetState
from trainmaster.targets import Poll

HOSTS = ("algo-1", "algo-2")


def result(check: str, *findings: Finding) -> CheckResult:
    return CheckResult(check=check, findings=findings, took_s=0.0)


def job(hosts: Sequence[str] = HOSTS, *, world: int = 2, without: str = "", bad: bool = False) -> ClusterHealth:
    """What the first host of a whole run at level 2 writes."""
    per_host = [
        result(name, *(ok("fine", device=host, world_size=world) for host in hosts))
        for name in ("sagemaker_job", "efa_communication", "nccl_tests")
    ]
    collectives = [result(name, ok("fine")) for name in PLANNED]
    found = [one for one in (*per_host, *collectives) if one.check != without]
    if bad:
        found.append(result("drift", fail("judged there, and again here", action="look")))
    own = result("shm", ok("fine"))
    nodes = tuple(NodeHealth(node=host, level=2, planned=("shm",), results=(own,)) for host in hosts)
    return ClusterHealth(asked=tuple(hosts), nodes=nodes, cluster=tuple(found))


def errors(found: Sequence[CheckResult]) -> dict[str, int]:
    wrong = {one.check: [f for f in one.findings if f.verdict is Verdict.ERROR] for one in found}
    return {name: len(findings) for name, findings in wrong.items() if findings}


def test_a_whole_run_has_one_result_for_collectives_and_no_error() -> None:
    found = between(job(bad=True), HOSTS, level=2, tests=True)
    assert [one.check for one in found] == ["sagemaker_job", "efa_communication", "nccl_tests", "collectives"]
    assert errors(found) == {}


@pytest.mark.parametrize("name", ["sagemaker_job", "efa_communication", "nccl_tests", *PLANNED])
def test_what_is_missing_is_an_error(name: str) -> None:
    shown = "collectives" if name in PLANNED else name
    found = between(job(without=name), HOSTS, level=2, tests=True)
    assert errors(found) == {shown: 1 if name in PLANNED else 2}


def test_a_result_of_one_host_does_not_stand_for_the_other() -> None:
    one = ClusterHealth(asked=HOSTS, nodes=(), cluster=job(HOSTS[:1]).cluster)
    assert errors(between(one, HOSTS, level=2, tests=True)) == {
        "sagemaker_job": 1, "efa_communication": 1, "nccl_tests": 1,
    }  # fmt: skip


def test_one_host_with_several_gpus_needs_collectives_and_one_gpu_does_not() -> None:
    alone = ("algo-1",)
    lacking = [one for one in job(alone, world=8).cluster if one.check not in PLANNED]
    many = ClusterHealth(asked=alone, nodes=(), cluster=tuple(lacking))
    assert errors(between(many, alone, level=2, tests=True)) == {"collectives": 1}
    single = [one for one in job(alone, world=1).cluster if one.check not in PLANNED]
    assert (
        errors(between(ClusterHealth(asked=alone, nodes=(), cluster=tuple(single)), alone, level=2, tests=True)) == {}
    )


def test_hosts_that_were_checked_alone_need_their_job_only() -> None:
    only = ClusterHealth(asked=HOSTS, nodes=(), cluster=job().cluster[:1])
    assert errors(between(only, HOSTS, level=1, tests=False)) == {}


@pytest.mark.parametrize("text", [None, "", "[]", "7", '{"asked": ["algo-1"], "nodes": []}', "[" * 100_000])
def test_what_cannot_be_used_is_told(text: str | None) -> None:
    found = parse(text, HOSTS)
    assert isinstance(found, str)
    assert errors(between(found, HOSTS, level=2, tests=True)) == {"sagemaker_job": 1}


@pytest.mark.parametrize("state", [TargetState.FAILED, TargetState.LOST])
def test_a_job_that_did_not_complete_needs_a_verdict_that_says_why(state: TargetState) -> None:
    good = job()
    bad = ClusterHealth(asked=HOSTS, nodes=good.nodes, cluster=(result("gpu", fail("dead", action="replace it")),))
    poll = Poll(state=state, note="AlgorithmError")
    assert end(poll, bad, bad, {}).verdict is Verdict.PASS
    for theirs, ours in ((good, good), (bad, good), (good, bad), ("no health.json", bad)):
        assert end(poll, theirs, ours, {}).verdict is Verdict.ERROR
    assert end(Poll(state=TargetState.SUCCEEDED), good, good, {}).verdict is Verdict.PASS
