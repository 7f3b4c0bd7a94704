"""How much memory can still be taken before something is killed for it."""

from __future__ import annotations

import re

from trainmaster.core.errors import HostError
from trainmaster.node import cgroup
from trainmaster.node.host import Host


def free_bytes(host: Host) -> int:
    """What the kernel says could be used without swapping, within the limit of the container where there is one."""
    found = re.search(r"^MemAvailable:\s+(\d{1,15}) kB$", host.read("/proc/meminfo"), flags=re.MULTILINE | re.ASCII)
    if found is None:
        raise HostError("/proc/meminfo has no MemAvailable")
    limit = cgroup.read_memory(host)
    free = int(found[1]) * 1024
    return free if limit is None else min(free, limit[1])
