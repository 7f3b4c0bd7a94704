"""Acceptance training in the pods of a Kubernetes cluster: one pod per node, one rank per GPU, one verdict.

An ordinary submission through the Kubernetes target, with all nodes that have GPUs. A node that is cordoned, not ready
or offers fewer GPUs than others makes the run INCOMPLETE: the cluster is accepted whole, or without the nodes that the
settings file leaves out (`not_nodes`). Logs are brought here, and everything that was created is deleted.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster import targets
from trainmaster.bench.accept.options import Options, words
from trainmaster.cluster.acceptance import (
    MODULE,
    find_unequal,
    incomplete,
    run_job,
)
from trainmaster.cluster.acceptance_files import JOB, LABELS
from trainmaster.cluster.kube_nodes import NO_GPU, KubeNode, find_nodes, list_nodes
from trainmaster.cluster.termination import run
from trainmaster.core.spec import JobSpec, Limits, Preflight, Resources
from trainmaster.targets import Placement, Submission
from trainmaster.targets.kubernetes import planning
from trainmaster.targets.kubernetes.settings import Settings
from trainmaster.targets.kubernetes.target import Kubernetes

_ACTION = "see `kubectl describe` of the pods' node, and `trainmaster check --on` it"


def accept(target: Kubernetes, options: Options) -> dict[str, Any]:
    """Train on all nodes; the document of the run. Ctrl-C and SIGTERM delete the pods too."""
    return run(_accept(target, options))


def dry_run(target: Kubernetes, options: Options) -> str:
    """The objects that `accept` would create, as YAML. Asks the cluster for its nodes, and changes nothing."""

    async def ask() -> str:
        try:
            settings = target.settings()
            nodes = await _find_nodes(settings, options)
            submission, _ = plan(settings, nodes, options, Path())
            return "\n".join(submission.files.values())
        finally:
            await targets.close()

    return asyncio.run(ask())


async def _accept(target: Kubernetes, options: Options) -> dict[str, Any]:
    try:
        with tempfile.TemporaryDirectory(prefix="trainmaster-accept-") as name:
            settings = target.settings()
            nodes = await _find_nodes(settings, options)
            if missing := find_missing(nodes, options):
                return incomplete(options, missing, world=len(nodes))
            submission, world = plan(settings, nodes, options, Path(name))
            return await run_job(target, submission, options, world=world, action=_ACTION)
    finally:
        await targets.close()


def plan(settings: Settings, nodes: Sequence[KubeNode], options: Options, folder: Path) -> tuple[Submission, int]:
    """The submission and the number of its ranks: one pod on every node."""
    gpus = 0 if options.backend == "gloo" else min((one.gpus for one in nodes), default=0)
    per_node = options.processes or gpus or 1
    # Files of this machine mean nothing in a pod.
    given = [*words(replace(options, processes=None, baselines=None, log_dir=None)), "--out", "-"]
    spec = JobSpec(
        name=JOB,
        target="kubernetes",
        resources=Resources(nodes=len(nodes), processes_per_node=per_node),
        preflight=Preflight(level=0),
        limits=Limits(stall_minutes=None),
        command=(settings.python, "-m", MODULE, *given),
    )
    own = replace(
        settings, spread=True, labels={**LABELS, **settings.labels},
        gpus=settings.gpus if settings.gpus is not None else per_node if gpus else 0,
    )  # fmt: skip
    placement = Placement(attempt=f"{uuid.uuid4()}.1", spec=spec, job_folder=folder)
    return planning.plan(placement, own), len(nodes) * per_node


def find_missing(nodes: Sequence[KubeNode], options: Options) -> dict[str, tuple[str, str]]:
    """Reason and action for every node that cannot take part."""
    if not nodes:
        return {"cluster": ("it has no node that takes pods", "see `kubectl get nodes`, and node_labels and not_nodes")}
    action = "bring it back, or leave it out with not_nodes in the settings file"
    wrong = {one.name: (one.fault, action) for one in nodes if one.fault}
    if options.processes is None and options.backend != "gloo":
        wrong |= find_unequal({one.name: one.installed for one in nodes})
        for one in nodes:
            if one.lost:
                wrong[one.name] = (NO_GPU, "see the device plugin's log on it")
            elif one.gpus < one.installed:
                broken = f"{one.gpus} of its {one.installed} GPUs are in working order"
                wrong[one.name] = (broken, "see the device plugin's log on it")
    return wrong


async def _find_nodes(settings: Settings, options: Options) -> list[KubeNode]:
    return find_nodes(await list_nodes(settings), settings, without_gpus=options.backend == "gloo")
