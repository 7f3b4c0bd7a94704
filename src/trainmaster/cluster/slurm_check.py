"""Checks on the nodes of a Slurm cluster: one srun per node, all at once, every answer kept.

A node that Trainmaster has drained is retested: it is resumed inside a reservation that no other job may use, checked,
and drained again with its reason; `trainmaster readmit` then resumes it. Should this process die in between, the
reservation stays, without an end, and keeps jobs away until the next check.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from trainmaster import targets
from trainmaster.cluster.exchange import Answer, unwrap
from trainmaster.cluster.gather import Ask, CheckRequest, TransferStats, gather_by
from trainmaster.cluster.remedy import PREFIX
from trainmaster.cluster.slurm_nodes import FREE_S, OUT, SlurmNode, SlurmNodes, ask, options, scontrol
from trainmaster.cluster.slurm_programs import run_bootstrap
from trainmaster.core.errors import TargetError
from trainmaster.core.health import ClusterHealth
from trainmaster.targets.slurm.queue import Queue, queue
from trainmaster.targets.slurm.settings import SlurmSettings
from trainmaster.targets.slurm.target import node_half
from trainmaster.targets.ssh.connect import NodeUnavailable
from trainmaster.targets.ssh.hosts import SshHost

AT_ONCE = 64
_RESERVATION = "trainmaster_retest_"


def gather(
    cluster: SlurmNodes,
    request: CheckRequest,
    *,
    bundle: Path | None = None,
    on_answer: Callable[[str, str], None] | None = None,
    stats: TransferStats | None = None,
) -> ClusterHealth:
    """Health of every node, or the reason it is silent."""
    return gather_by(
        _open_cluster(cluster, request), cluster.hosts, request, bundle=bundle, on_answer=on_answer, stats=stats
    )


@contextlib.asynccontextmanager
async def _open_cluster(cluster: SlurmNodes, request: CheckRequest) -> AsyncIterator[Ask]:
    nodes = {node.name: node for node in cluster.nodes}
    gate = asyncio.Semaphore(AT_ONCE)
    try:
        where = queue(cluster.settings)
        result, _ = await where.ask("prepare", package=node_half(cluster.settings))

        async def one(host: SshHost) -> Answer:
            node = nodes[host.name]
            try:
                async with gate, _open(where, node) as within:
                    return await _check(
                        where, node, request, cluster.settings, package=str(result["package"]), within=within
                    )
            except NodeUnavailable:
                raise
            except TargetError as wrong:
                action = "see `scontrol show node` and the log of its slurmd"
                raise NodeUnavailable(str(wrong), action=action) from None

        yield one
    finally:
        await targets.close()


@contextlib.asynccontextmanager
async def _open(where: Queue, node: SlurmNode) -> AsyncIterator[str | None]:
    """The reservation to check a node in; None for a node in service. Afterwards the node is drained as before."""
    name = f"{_RESERVATION}{node.name}"
    left_over = node.name if await _has_reservation(where, name) else None
    if not node.ours and left_over is None:
        if node.out_of_service is not None:
            raise NodeUnavailable(node.out_of_service, action="repair and resume it, then check it again")
        yield None
        return
    if any(state in OUT and state not in ("DRAIN", "MAINT") for state in node.states):
        raise NodeUnavailable(
            f"Slurm shows it as {'+'.join(node.states)}", action="start its slurmd, then check it again"
        )
    reason = node.reason if node.ours else f"{PREFIX} a retest was interrupted"
    if left_over is None:
        user = (await ask(where, ["id", "-un"], program=False)).strip()
        fields = [
            f"ReservationName={name}", f"Nodes={node.name}", f"Users={user}", "StartTime=now", "Duration=UNLIMITED",
            "Flags=MAINT,IGNORE_JOBS",
        ]  # fmt: skip
        try:
            await scontrol(where, "create", "reservation", *fields)
        except TargetError as wrong:
            text = f"it is drained ({node.reason}), and a retest needs the rights of an operator: {wrong}"
            raise NodeUnavailable(text, action="run the check as an operator of Slurm") from None
    try:
        if "DRAIN" in node.states:
            await scontrol(where, "update", f"nodename={node.name}", "state=resume")
        yield name
    finally:
        await scontrol(where, "update", f"nodename={node.name}", "state=drain", f"reason={reason}")
        await scontrol(where, "delete", f"ReservationName={name}")


async def _has_reservation(where: Queue, name: str) -> bool:
    return f"ReservationName={name} " in await scontrol(where, "show", "reservation", "--oneliner")


async def _check(
    where: Queue, node: SlurmNode, request: CheckRequest, settings: SlurmSettings, *, package: str, within: str | None
) -> Answer:
    """Run the checks on a node and read its answer."""
    started, name = time.monotonic(), f"trainmaster-check-{secrets.token_hex(6)}"
    words = ["srun", *options(node, settings, name=name, limit_s=request.timeout_s)]
    words += [f"--reservation={within}"] if within else []
    try:
        data = await run_bootstrap(
            where, words, {"words": request.words(node.name)}, python=settings.python, package=package,
            timeout_s=request.timeout_s, wait_s=FREE_S,
        )  # fmt: skip
    except BaseException:
        # srun is dead by now, its job need not be: it would hold the node, and its reservation, until its time limit.
        with contextlib.suppress(TargetError):
            await where.ask("run", words=["scancel", "--quiet", f"--name={name}"], timeout_s=60.0)
        raise
    health, files = unwrap(data)
    return Answer(
        health=health, files=files, sent_bytes=0, received_bytes=len(data), took_s=round(time.monotonic() - started, 3)
    )
