"""Nodes of `--on TARGET` for check, accept, bandwidth and isolate; for other targets an error with another way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli import _yaml_file
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.cluster.kube_nodes import KubeNodes
    from trainmaster.cluster.nodes import Nodes
    from trainmaster.cluster.sagemaker_check import SageMakerNodes
    from trainmaster.cluster.slurm_nodes import SlurmNodes
    from trainmaster.targets.ssh.hosts import SshHosts


def load_nodes(word: str, *, verb: str) -> Nodes:
    """The nodes that `--on` names: ssh:FILE, slurm, slurm:FILE, kubernetes, kubernetes:FILE. UsageError for others."""
    kind, _, options = word.partition(":")
    if kind == "slurm":
        return _load_slurm(word)
    if kind == "kubernetes":
        return _load_kubernetes(word)
    if kind == "ssh" and options:
        return load_hosts(word)
    raise UsageError(_refuse(word, kind, verb))


def load_training_job(word: str, count: int) -> SageMakerNodes:
    """The hosts of the training job that `check --on sagemaker:FILE` makes."""
    from trainmaster.cluster.sagemaker_check import load_nodes

    path = word.partition(":")[2]
    if not path:
        raise UsageError(f"--on {word}: write the settings file too: --on sagemaker:account.yaml")
    return load_nodes(Path(path), count)


def load_hosts(word: str) -> SshHosts:
    """The nodes that `--on ssh:FILE` names."""
    from trainmaster.targets.ssh.hosts import parse_hosts

    path = Path(word.partition(":")[2])
    return _yaml_file.load(path).read(lambda document: parse_hosts(document, path.parent))


def _load_slurm(word: str) -> SlurmNodes:
    from trainmaster import targets
    from trainmaster.cluster.slurm_nodes import list_nodes
    from trainmaster.targets.slurm.target import Slurm

    target = targets.load(word)
    assert isinstance(target, Slurm)
    found = list_nodes(target.settings)
    if not found.nodes:
        raise UsageError(f"--on {word}: no node is listed by Slurm, or the cluster file excludes all")
    return found


def _load_kubernetes(word: str) -> KubeNodes:
    from trainmaster import targets
    from trainmaster.cluster.kube_nodes import load_nodes
    from trainmaster.targets.kubernetes.target import Kubernetes

    target = targets.load(word)
    assert isinstance(target, Kubernetes)
    found = load_nodes(target)
    if not found.nodes:
        raise UsageError(f"--on {word}: the cluster has no node that takes pods; see node_labels and not_nodes in it")
    return found


def _refuse(word: str, kind: str, verb: str) -> str:
    from trainmaster import targets

    stated = {name: targets.traits(name) for name in targets.names()}
    places = [
        traits.spell(name)
        for name, traits in stated.items()
        if not traits.here and (traits.nodes or verb in traits.one_job)
    ]
    where = f"{verb} runs on {', '.join(places[:-1])} and {places[-1]}"
    if kind not in stated:
        return f"--on {word}: {kind!r} is not a target; {where}"
    if stated[kind].nodes and not stated[kind].here:
        return f"--on {word}: write the file too: --on {stated[kind].spell(kind)}"
    return f"--on {word}: {where}; on {kind}, {stated[kind].alternative(verb)}"
