"""The hosts file of `--on ssh:FILE`, read from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli import _yaml_file
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.cluster.slurm_nodes import SlurmNodes
    from trainmaster.targets.ssh.hosts import SshHosts


def load_nodes(word: str) -> SshHosts | SlurmNodes:
    """The nodes that `--on ssh:FILE`, `--on slurm` or `--on slurm:FILE` names."""
    if word.partition(":")[0] != "slurm":
        return load_hosts(word)
    from trainmaster import targets
    from trainmaster.cluster.slurm_nodes import list_nodes
    from trainmaster.targets.slurm.target import Slurm

    target = targets.load(word)
    assert isinstance(target, Slurm)
    found = list_nodes(target.settings)
    if not found.nodes:
        raise UsageError(f"--on {word}: no node is listed by Slurm, or the cluster file excludes all")
    return found


def load_hosts(word: str) -> SshHosts:
    """The nodes that `--on ssh:FILE` names."""
    from trainmaster.targets.ssh.hosts import parse_hosts

    kind, _, options = word.partition(":")
    if kind != "ssh" or not options:
        raise UsageError(f"--on {word}: write ssh:hosts.yaml; this verb runs on no other target yet")
    path = Path(options)
    return _yaml_file.load(path).read(lambda document: parse_hosts(document, path.parent))
