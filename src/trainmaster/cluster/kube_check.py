"""Checks on the nodes of a Kubernetes cluster: one pod per node, all at once, every answer kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trainmaster.cluster.exchange import Answer, unwrap
from trainmaster.cluster.gather import Ask, CheckRequest, TransferStats, gather_by
from trainmaster.cluster.kube_nodes import KubeNode, KubeNodes
from trainmaster.cluster.kube_programs import KubeLink
from trainmaster.core.health import ClusterHealth
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok
from trainmaster.targets.ssh.hosts import SshHost

OFFER = "kubernetes_gpus"  # result about what the cluster lists
_COUNT = "gpu_count"


def gather(
    cluster: KubeNodes,
    request: CheckRequest,
    *,
    bundle: Path | None = None,
    on_answer: Callable[[str, str], None] | None = None,
    stats: TransferStats | None = None,
) -> ClusterHealth:
    """Health of every node, or the reason it is silent."""
    opened = _open_checks(cluster, request)
    health = gather_by(opened, cluster.hosts, request, bundle=bundle, on_answer=on_answer, stats=stats)
    if cluster.settings.gpus == 0:  # the pods ask for none
        return health
    return replace(health, cluster=(*health.cluster, *compare_offer(cluster.nodes, health)))


def compare_offer(offered: Sequence[KubeNode], health: ClusterHealth) -> tuple[CheckResult, ...]:
    """GPUs that the cluster lists and that the pods did not find. Nothing where GPUs were not counted. Pure."""
    found: list[Finding] = []
    listed, by_name = {}, {node.name: node for node in offered if node.installed and not node.lost}
    for node in health.nodes:
        counted = [finding for result in node.results if result.check == _COUNT for finding in result.findings]
        if node.node in by_name and counted:
            listed[node.node] = counted
    for name, counted in listed.items():
        gpus, installed = by_name[name].gpus, by_name[name].installed
        if gpus < installed:
            reason = f"{gpus} of its {installed} GPUs are in working order, by the device plugin"
            found.append(fail(reason, action="see the device plugin's log on it", device=name))
        elif all(finding.verdict is Verdict.SKIP for finding in counted):
            reason = f"the cluster lists {installed} GPUs of it, and its pod found none"
            found.append(error(reason, action="is the NVIDIA runtime set up in its containerd?", device=name))
    if listed and not found:
        found.append(ok("every pod found GPUs where the cluster lists them"))
    return (CheckResult(check=OFFER, findings=tuple(found), took_s=0.0),) if found else ()


@contextlib.asynccontextmanager
async def _open_checks(cluster: KubeNodes, request: CheckRequest) -> AsyncIterator[Ask]:
    link = KubeLink(cluster, limit_s=request.timeout_s)

    async def one(host: SshHost) -> Answer:
        started = time.monotonic()
        data = await link.ask(host.name, {"words": request.words(host.name)}, timeout_s=request.timeout_s)
        health, files = unwrap(data)
        took_s = round(time.monotonic() - started, 3)
        return Answer(health=health, files=files, sent_bytes=0, received_bytes=len(data), took_s=took_s)

    try:
        yield one
    finally:
        await link.close()
