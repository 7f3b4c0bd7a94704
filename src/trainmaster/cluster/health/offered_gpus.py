"""GPUs that a cluster lists for its nodes, against those that the nodes found themselves."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.core.health import NodeHealth
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok
from trainmaster.targets import Node

OFFER = "kubernetes_gpus"  # result about what the cluster lists
_COUNT = "gpu_count"


def compare_offer(offered: Sequence[Node], nodes: Sequence[NodeHealth]) -> tuple[CheckResult, ...]:
    """GPUs that the cluster lists and that the nodes did not find. Nothing where GPUs were not counted. Pure."""
    findings: list[Finding] = []
    counts = {
        node.node: [finding for result in node.results if result.check == _COUNT for finding in result.findings]
        for node in nodes
    }
    compared = [node for node in offered if node.installed and counts.get(node.name)]
    for node in compared:
        if node.gpus is not None and node.installed is not None and node.gpus < node.installed:
            reason = f"{node.gpus} of its {node.installed} GPUs are in working order, by the device plugin"
            findings.append(fail(reason, action="see the device plugin's log on it", device=node.name))
        elif all(finding.verdict is Verdict.SKIP for finding in counts[node.name]):
            reason = f"the cluster lists {node.installed} GPUs of it, and its pod found none"
            findings.append(error(reason, action="is the NVIDIA runtime set up in its containerd?", device=node.name))
    if compared and not findings:
        findings.append(ok("every pod found GPUs where the cluster lists them"))
    return (CheckResult(check=OFFER, findings=tuple(findings), took_s=0.0),) if findings else ()
