"""Nodes that `--on` names, of whichever target."""

from __future__ import annotations

from trainmaster.cluster.kube_nodes import KubeNodes
from trainmaster.cluster.slurm_nodes import SlurmNodes
from trainmaster.targets.ssh.hosts import SshHosts

Nodes = SshHosts | SlurmNodes | KubeNodes
