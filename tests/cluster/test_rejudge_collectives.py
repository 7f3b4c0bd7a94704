"""A saved run of collectives is judged by expectations stated afterwards, or is INCOMPLETE; never kept as it was."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines import H200
from trainmaster.checks import document
from trainmaster.cluster.collectives import rejudge_collectives
from trainmaster.cluster.health import evidence
from trainmaster.core.expect import Expect
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import CheckResult, Finding, Verdict, error, ok, skip, warn
from trainmaster.node.recorded import RecordedHost

IB = "NET/IB between nodes (32 channel ends, GPU memory direct), P2P/CUMEM inside a node (224 channel ends)"
TCP = "NET/Socket between nodes (32 channel ends)"


def run(words: str = IB, *, gbps: float = 300.0, **values: Any) -> list[Finding]:
    """Findings of collectives that finished."""
    curve = {"1048576": 500.0, "1073741824": gbps}
    return [
        ok(f"carried by {words}", carried=words),
        warn("all_reduce: measured", action="state it", collective="all_reduce", busbw_gbps=curve, transport=words,
             backend="nccl", **values),
    ]  # fmt: skip


def rejudge(findings: list[Finding], *, before: Mapping[str, Any] | None = None, **overrides: Any) -> list[Finding]:
    nodes = [NodeHealth(node=name, level=2, planned=(), results=(), expect=before or {}) for name in ("a", "b")]
    kept = CheckResult(check="collectives", findings=tuple(findings), took_s=1.0)
    return list(rejudge_collectives.rejudge(kept, nodes, overrides).findings)


def worst(findings: list[Finding]) -> Verdict:
    return CheckResult(check="collectives", findings=tuple(findings), took_s=0.0).verdict


@pytest.mark.parametrize(("least", "verdict"), [(400.0, Verdict.FAIL), (300.0, Verdict.PASS), (100.0, Verdict.PASS)])
def test_a_floor_stated_afterwards_is_judged_at_the_largest_size(least: float, verdict: Verdict) -> None:
    assert worst(rejudge(run(), busbw_gbps=least)) is verdict


def test_a_run_without_bandwidths_does_not_meet_a_floor() -> None:
    assert worst(rejudge([ok("all ranks finished")], busbw_gbps=1.0)) is Verdict.ERROR
    damaged = ok("all_reduce", collective="all_reduce", busbw_gbps={"large": "fast"})
    assert worst(rejudge([damaged], busbw_gbps=1.0)) is Verdict.ERROR


@pytest.mark.parametrize(("words", "wanted", "verdict"), [
    (IB, "IB", Verdict.PASS), (TCP, "IB", Verdict.FAIL), ("Socket", "IB", Verdict.FAIL), (TCP, "EFA", Verdict.FAIL),
    (TCP, "Socket", Verdict.PASS), (IB, "Socket", Verdict.ERROR), (IB, "EFA", Verdict.ERROR),
    (IB, "NVLS", Verdict.ERROR), ("gloo carries everything by TCP, over the network", "IB", Verdict.FAIL),
    ("NET/IB between nodes (2 channel ends), NET/OFI between nodes (2 channel ends)", "IB", Verdict.ERROR),
])  # fmt: skip
def test_a_transport_stated_afterwards_is_judged_by_the_kept_proof(words: str, wanted: str, verdict: Verdict) -> None:
    assert rejudge(run(words), transport=wanted)[-1].verdict is verdict


def test_devices_that_a_profile_expects_imply_the_transport() -> None:
    assert rejudge(run(TCP), efa_devices=32)[-1].verdict is Verdict.FAIL
    assert rejudge(run(TCP), ib_ports=8)[-1].verdict is Verdict.FAIL


def test_a_transport_that_was_not_proven_is_not_proven_now() -> None:
    unproven = error("the log of NCCL is not whole", action="run again", carried=IB)
    assert rejudge([unproven], transport="IB")[-1].verdict is Verdict.ERROR
    assert rejudge([ok("all ranks finished")], transport="IB")[-1].verdict is Verdict.ERROR


def test_collectives_that_were_skipped_are_not_measured() -> None:
    none = skip("no torch", proof="collectives are not required here")
    assert worst(rejudge([none], collectives=True)) is Verdict.ERROR
    assert worst(rejudge(run(), collectives=True)) is Verdict.WARN


def test_what_the_run_was_judged_by_is_kept() -> None:
    stated = {"busbw_gbps": 100.0, "transport": "IB", "ib_ports": 8}
    assert rejudge(run(), before=stated, **stated) == run()
    assert rejudge(run(), before=stated) == run()


@pytest.mark.parametrize(("overrides", "overall"), [
    ({}, "PASS"), ({"busbw_gbps": 400.0}, "FAIL"), ({"transport": "IB"}, "FAIL"), ({"transport": "NVLS"}, "FAIL"),
    ({"busbw_gbps": 10.0}, "PASS"),
])  # fmt: skip
def test_a_bundle_is_judged_by_the_new_expectation(tmp_path: Path, overrides: dict[str, Any], overall: str) -> None:
    only = ["ram", "shm"]  # two captures of one machine; its GPU would show it
    node = document.measure(RecordedHost(H200), Expect(), level=1, only=only, node="a", profile=None, alone=False)
    found = ok("all_reduce", collective="all_reduce", busbw_gbps={"1073741824": 20.0}, transport=TCP, backend="nccl")
    kept = CheckResult(check="collectives", findings=(found,), took_s=1.0)
    nodes = (node, replace(node, node="b"))
    for name in ("a", "b"):
        shutil.copytree(H200, evidence.capture_folder(tmp_path, name))
    evidence.save(tmp_path, ClusterHealth(asked=("a", "b"), nodes=nodes, cluster=(kept,)))
    assert str(evidence.rejudge(tmp_path, overrides).overall) == overall
