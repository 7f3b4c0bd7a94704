"""Memory may be locked. RDMA registers the memory it sends, and NCCL over InfiniBand or EFA fails below its size."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.checks import system_files
from trainmaster.checks.comparison import setting
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("memlock_gib",)
COMPARES = (setting("limit_gib", "locked-memory limit", none="unlimited", unit="GiB"),)
METRICS: dict[str, str] = {}
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    limit_bytes: int | None  # None is unlimited
    rdma: tuple[str, ...]  # RDMA devices of this machine


def read(host: Host) -> Lock:
    limit = system_files.read_limit(host, "Max locked memory")
    rdma = system_files.list_rdma(host)  # EFA and RoCE devices are here too
    return Lock(limit_bytes=limit, rdma=rdma)


def judge(lock: Lock, expect: Expect) -> Finding:
    if lock.limit_bytes is None:
        return ok("unlimited", limit_gib=None)
    limit = lock.limit_bytes / GIB
    summary = f"{limit:g} GiB may be locked" if limit >= 1 else f"{limit * 1024:g} MiB may be locked"
    action = "set `* - memlock unlimited` in /etc/security/limits.conf, or start the container with --ulimit memlock=-1"
    if expect.memlock_gib is not None:
        if limit < expect.memlock_gib:
            return fail(f"{summary}, not {expect.memlock_gib:g} GiB", action=action, limit_gib=limit)
        return ok(summary, limit_gib=limit)
    if lock.rdma:
        return warn(f"{summary}, and {', '.join(lock.rdma)} want it unlimited", action=action, limit_gib=limit)
    return ok(f"{summary}; no RDMA device needs more", limit_gib=limit)
