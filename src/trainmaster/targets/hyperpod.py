"""Target `hyperpod:cluster.yaml`: as `kubernetes`, with HyperPodPyTorchJobs unless the file states another kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.targets import kubernetes

if TYPE_CHECKING:
    from trainmaster.targets.kubernetes.target import Kubernetes


def create(options: str) -> Kubernetes:
    """The target with the settings of a file."""
    return kubernetes.create(options, kind="hyperpod")
