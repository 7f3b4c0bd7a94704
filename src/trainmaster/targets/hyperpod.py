"""Target `hyperpod:cluster.yaml`: as `kubernetes`, with HyperPodPyTorchJobs unless the file states another kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.targets import kubernetes
from trainmaster.targets._traits import Traits

if TYPE_CHECKING:
    from trainmaster.targets.kubernetes.target import Kubernetes

TRAITS = Traits(
    title="pods of a SageMaker HyperPod cluster",
    option="file",
    example="cluster.yaml",
    starts="`{kind: hyperpod, image: registry.example.org/train:1, gpus: 8}` (docs/guides/kubernetes.md)",
    instead={
        "check": "use `trainmaster cluster validate` and `trainmaster cluster test`",
        "accept": "use `trainmaster cluster test` and `trainmaster cluster perf`",
        "remedy": "its nodes are nodes of Kubernetes: use --on kubernetes",
    },
    queue=kubernetes.TRAITS.queue,  # task governance is Kueue
    accounts=kubernetes.TRAITS.accounts,
    no_spares="HyperPod keeps its own: set `hyperpod.spares` in the cluster file",
)
runs_as = kubernetes.runs_as
identify = kubernetes.identify


def create(options: str, *, user: str | None = None) -> Kubernetes:
    """The target with the settings of a file."""
    return kubernetes.create(options, kind="hyperpod", user=user)
