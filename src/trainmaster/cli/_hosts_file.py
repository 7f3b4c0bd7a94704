"""The hosts file of `--on ssh:FILE`, read from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli import _yaml_file
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.targets.ssh.hosts import SshHosts


def load_hosts(word: str) -> SshHosts:
    """The nodes that `--on ssh:FILE` names."""
    from trainmaster.targets.ssh.hosts import parse_hosts

    kind, _, options = word.partition(":")
    if kind != "ssh" or not options:
        raise UsageError(f"--on {word}: write ssh:hosts.yaml; no other target can be checked yet")
    path = Path(options)
    return _yaml_file.load(path).read(lambda document: parse_hosts(document, path.parent))
