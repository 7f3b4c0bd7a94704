"""Memory that can still be allocated before the OOM killer acts."""

from __future__ import annotations

import re

from trainmaster.core.errors import HostError
from trainmaster.node import cgroup
from trainmaster.node.host import Host


def free_bytes(host: Host) -> int:
    """Bytes usable without swapping, within the container's limit."""
    match = re.search(r"^MemAvailable:\s+(\d{1,15}) kB$", host.read("/proc/meminfo"), flags=re.MULTILINE | re.ASCII)
    if match is None:
        raise HostError("/proc/meminfo has no MemAvailable")
    limit = cgroup.read_memory(host)
    free = int(match[1]) * 1024
    return free if limit is None else min(free, limit[1])
