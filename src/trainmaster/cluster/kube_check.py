"""Checks on the nodes of a Kubernetes cluster: one pod per node, all at once, every answer kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from trainmaster.cluster.exchange import Answer, unwrap
from trainmaster.cluster.gather import Ask, CheckRequest, TransferStats, gather_by
from trainmaster.cluster.kube_nodes import KubeNodes
from trainmaster.cluster.kube_programs import KubeLink
from trainmaster.core.health import ClusterHealth
from trainmaster.targets.ssh.hosts import SshHost


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
    return gather_by(opened, cluster.hosts, request, bundle=bundle, on_answer=on_answer, stats=stats)


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
