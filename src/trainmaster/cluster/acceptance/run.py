"""Acceptance training over the nodes of a target: one rank per GPU on every node, one verdict.

Programs on each node, or one job of the target where it runs a program on all its nodes itself. Every node must take
part: one that cannot be reached, has no torch or lacks GPUs makes the run INCOMPLETE, and is named.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster import targets
from trainmaster.bench.accept.options import Options, words
from trainmaster.checks.profiles import find_instance
from trainmaster.cluster.acceptance.files import APP, JOB
from trainmaster.cluster.acceptance.judge import incomplete, judge_job, judge_outcomes
from trainmaster.cluster.collectives import launch
from trainmaster.cluster.collectives.launch import Capabilities, meeting_point
from trainmaster.cluster.termination import run
from trainmaster.core.errors import NodeUnavailable
from trainmaster.targets import ClusterJob, Node, Program, ReachesNodes, RunsClusterJobs

MODULE = "trainmaster.bench.accept"
START_S = 900.0  # beside the measured steps: packages, compilation, warm-up


def accept(
    target: ReachesNodes | RunsClusterJobs,
    options: Options,
    *,
    home: Path,
    nodes: int | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train on all nodes; the document of the run. Ctrl-C and SIGTERM end what was started there too.

    `nodes`: how many, where the target makes them. `on_note` tells what has to be kept, as the name of a paid job.
    """
    if isinstance(target, RunsClusterJobs):
        return run(_accept_as_job(target, options, home, nodes, on_note))
    return run(_accept_on_nodes(target, options, home))


def dry_run(target: RunsClusterJobs, options: Options, *, home: Path, nodes: int | None = None) -> str:
    """What `accept` would create, as text. May ask the target for its nodes, and changes nothing."""

    async def render() -> str:
        try:
            return (await target.plan_cluster_job(make_job(options, nodes), home=home, folder=Path())).render()
        finally:
            await targets.close()

    return asyncio.run(render())


async def _accept_as_job(
    target: RunsClusterJobs, options: Options, home: Path, nodes: int | None, on_note: Callable[[str], None]
) -> dict[str, Any]:
    try:
        with tempfile.TemporaryDirectory(prefix="trainmaster-accept-") as folder:
            planned = await target.plan_cluster_job(make_job(options, nodes), home=home, folder=Path(folder))
            if planned.missing:
                return incomplete(options, planned.missing, world=planned.world)
            return judge_job(options, await planned.run(on_note), world=planned.world)
    finally:
        await targets.close()


async def _accept_on_nodes(target: ReachesNodes, options: Options, home: Path) -> dict[str, Any]:
    timeout_s = limit_s(options)
    access = target.open_nodes(limit_s=timeout_s, home=home)
    try:
        nodes = await access.nodes()
        offers = await launch.query_capabilities(nodes, access)
        if missing := _missing(offers, options):
            return incomplete(options, missing, world=len(nodes))
        ready = {name: offer for name, offer in offers.items() if isinstance(offer, Capabilities)}
        jobs = plan(nodes, ready, options)
        outcomes = await launch.run_together(jobs, access, timeout_s=timeout_s)
    finally:
        await access.close()
    return judge_outcomes(options, [node.name for node in nodes], outcomes, per_node=len(jobs[0][1]))


def make_job(options: Options, nodes: int | None = None) -> ClusterJob:
    """The run as one job of a target."""
    return ClusterJob(
        name=JOB, app=APP, module=MODULE, words=tuple(_words(options)), processes=options.processes, nodes=nodes,
        limit_s=limit_s(options), uses_gpus=options.backend != "gloo", gpus_of=_count_gpus,
    )  # fmt: skip


def _count_gpus(kind: str) -> int | None:
    instance = find_instance(kind)
    return instance.gpus if instance is not None else None


def _words(options: Options) -> list[str]:
    # Files of this machine mean nothing on a node.
    return [*words(replace(options, processes=None, baselines=None, log_dir=None)), "--out", "-"]


def plan(
    nodes: Sequence[Node], ready: Mapping[str, Capabilities], options: Options
) -> list[tuple[Node, list[Program]]]:
    """The programs of every node: the same number of ranks on each, in torchrun's variables."""
    gpus = 0 if options.backend == "gloo" else min(offer.gpus for offer in ready.values())
    per_node = options.processes or gpus or 1
    master = meeting_point(nodes[0], ready[nodes[0].name])
    given = _words(options)
    return [
        (
            node,
            [
                Program(
                    module=MODULE,
                    words=given,
                    env=launch.environment(
                        rank=number * per_node + local, world=len(nodes) * per_node, local_rank=local,
                        local_world=per_node, node=number, nodes=len(nodes), master=master,
                        name=node.name,
                    ),
                )
                for local in range(per_node)
            ],
        )
        for number, node in enumerate(nodes)
    ]  # fmt: skip


def _missing(offers: Mapping[str, Capabilities | NodeUnavailable], options: Options) -> dict[str, tuple[str, str]]:
    """Reason and action for every node that cannot take part."""
    faults: dict[str, tuple[str, str]] = {}
    wants_gpus = options.backend != "gloo" and any(
        isinstance(offer, Capabilities) and offer.gpus for offer in offers.values()
    )
    for name, offer in offers.items():
        if isinstance(offer, NodeUnavailable):
            faults[name] = (offer.reason, offer.action)
        elif offer.torch is None:
            faults[name] = (offer.why, "install torch for its Python")
        elif wants_gpus and not offer.gpus:
            faults[name] = ("its torch sees no GPU, while other nodes have some", "install torch with CUDA on it")
        elif fault := offer.find_fault(options.backend):
            faults[name] = fault
        elif not offer.ports:
            faults[name] = ("no free port from 20000 to 29999", "list its listeners: ss -ltn")
    if not faults and wants_gpus and options.processes is None:
        faults |= targets.find_unequal(
            {name: offer.gpus for name, offer in offers.items() if isinstance(offer, Capabilities)}
        )
    return faults


def limit_s(options: Options) -> float:
    """The longest time of a run, with its start."""
    return START_S + (options.duration_s or 0.0) * options.repeats + options.timeout_s
