"""A program on all nodes of a Kubernetes cluster: one pod per node, a process per GPU, as one job of the target.

A node that is cordoned, not ready or offers fewer GPUs than others cannot take part: the cluster is measured whole, or
without the nodes that the settings file leaves out (`not_nodes`). Logs are brought here, and everything that was
created is deleted.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainmaster import targets
from trainmaster.core.spec import JobSpec, Limits, Preflight, Resources
from trainmaster.targets import Placement, Submission, Target
from trainmaster.targets._cluster_job import ClusterJob, ClusterJobEnd, Note, find_unequal
from trainmaster.targets._leftovers import remove_leftovers
from trainmaster.targets._runs import Run
from trainmaster.targets._submission_run import run_submission
from trainmaster.targets.kubernetes import names, planning
from trainmaster.targets.kubernetes.node_list import NO_GPU, KubeNode, list_nodes
from trainmaster.targets.kubernetes.settings import Settings

_ACTION = "see `kubectl describe` of the pods' node, and `trainmaster check --on` it"


class KubeClusterJob:
    """One job with a pod on every node."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        nodes: Sequence[KubeNode],
        job: ClusterJob,
        *,
        home: Path,
        folder: Path,
    ) -> None:
        self._target, self._settings, self._nodes, self._job = target, settings, nodes, job
        self._home, self._folder = home, folder
        self.missing: Mapping[str, tuple[str, str]] = find_missing(nodes, job)
        gpus = min((node.gpus for node in nodes), default=0) if job.uses_gpus else 0
        self._per_node = job.processes or gpus or 1
        self._gpus = settings.gpus if settings.gpus is not None else self._per_node if gpus else 0
        self.world = len(nodes) * (1 if self.missing else self._per_node)

    def render(self) -> str:
        return "\n".join(self.plan({}).files.values())

    async def run(self, on_note: Note) -> ClusterJobEnd:  # noqa: ARG002 (nothing to keep)
        run = Run(self._home)
        try:
            await remove_leftovers(self._target, self._home)
            submission = self.plan(names.owner_labels(run.owner))
            return await run_submission(self._target, submission, limit_s=self._job.limit_s, action=_ACTION)
        finally:
            run.close()
            await targets.close()

    def plan(self, marks: Mapping[str, str]) -> Submission:
        """The submission, with additional labels."""
        job, settings = self._job, self._settings
        spec = JobSpec(
            name=job.name,
            target="kubernetes",
            resources=Resources(nodes=len(self._nodes), processes_per_node=self._per_node),
            preflight=Preflight(level=0),
            limits=Limits(stall_minutes=None),
            command=(settings.python, "-m", job.module, *job.words),
        )
        own = replace(settings, spread=True, gpus=self._gpus, labels={"app": job.app, **settings.labels, **marks})
        return planning.plan(Placement(attempt=f"{uuid.uuid4()}.1", spec=spec, job_folder=self._folder), own)


async def plan(target: Target, settings: Settings, job: ClusterJob, *, home: Path, folder: Path) -> KubeClusterJob:
    """The job on the nodes that the cluster has now."""
    nodes = await list_nodes(settings, without_gpus=not job.uses_gpus)
    return KubeClusterJob(target, settings, nodes, job, home=home, folder=folder)


def find_missing(nodes: Sequence[KubeNode], job: ClusterJob) -> dict[str, tuple[str, str]]:
    """Reason and action for every node that cannot take part."""
    if not nodes:
        return {"cluster": ("it has no node that takes pods", "see `kubectl get nodes`, and node_labels and not_nodes")}
    action = "bring it back, or leave it out with not_nodes in the settings file"
    missing = {node.name: (node.fault, action) for node in nodes if node.fault}
    if job.processes is None and job.uses_gpus:
        missing |= find_unequal({node.name: node.installed for node in nodes})
        for node in nodes:
            if node.lost:
                missing[node.name] = (NO_GPU, "see the device plugin's log on it")
            elif node.gpus < node.installed:
                broken = f"{node.gpus} of its {node.installed} GPUs are in working order"
                missing[node.name] = (broken, "see the device plugin's log on it")
    return missing
