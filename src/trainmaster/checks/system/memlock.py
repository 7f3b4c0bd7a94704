"""Memory may be locked. RDMA registers the memory it sends, and NCCL over InfiniBand or EFA fails below its size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainmaster.core.errors import FileMissing, HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 1
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    limit_bytes: int | None  # None is unlimited
    rdma: tuple[str, ...]  # RDMA devices of this machine


def read(host: Host) -> Lock:
    match = re.search(r"^Max locked memory\s+(\d+|unlimited)\s", host.read("/proc/self/limits"), flags=re.MULTILINE)
    if not match:
        raise HostError("/proc/self/limits has no limit of locked memory")
    try:
        rdma = host.list("/sys/class/infiniband")  # EFA and RoCE devices are here too
    except FileMissing:
        rdma = ()
    return Lock(limit_bytes=None if match[1] == "unlimited" else int(match[1]), rdma=rdma)


def judge(lock: Lock, expect: Expect) -> Finding:
    if lock.limit_bytes is None:
        return ok("unlimited", limit_gib=None)
    limit = lock.limit_bytes / GIB
    told = f"{limit:g} GiB may be locked" if limit >= 1 else f"{limit * 1024:g} MiB may be locked"
    action = "set `* - memlock unlimited` in /etc/security/limits.conf, or start the container with --ulimit memlock=-1"
    if expect.memlock_gib is not None:
        if limit < expect.memlock_gib:
            return fail(f"{told}, not {expect.memlock_gib:g} GiB", action=action, limit_gib=limit)
        return ok(told, limit_gib=limit)
    if lock.rdma:
        return warn(f"{told}, and {', '.join(lock.rdma)} want it unlimited", action=action, limit_gib=limit)
    return ok(f"{told}; no RDMA device needs more", limit_gib=limit)
