"""The node, or the container, has the memory it should have, and enough of it is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.comparison import part
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node import cgroup
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("ram_gib", "ram_free_gib")
COMPARES = (part("total_gib", "memory", "look for a missing DIMM", tolerance=0.02, unit="GiB"),)
METRICS = {"system.memory.total_gb": "total_gib", "system.memory.available_gb": "free_gib"}
GIB = 1 << 30
# Importing torch with CUDA takes about 1 GiB per process before the first tensor.
FREE_WARN_GIB = 1.0
FREE_FAIL_GIB = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    total_bytes: int
    free_bytes: int
    limited: bool  # by the container, not by the machine


def read(host: Host) -> Memory:
    total, free = (system_files.read_memory_field(host, name) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = cgroup.read_memory(host)
    if limit is None or limit[0] >= total:
        return Memory(total_bytes=total, free_bytes=free, limited=False)
    return Memory(total_bytes=limit[0], free_bytes=min(free, limit[1]), limited=True)


def judge(memory: Memory, expect: Expect) -> Finding:
    total, free = memory.total_bytes / GIB, memory.free_bytes / GIB
    whose = " in this container" if memory.limited else ""
    summary = f"{free:.1f} of {total:.1f} GiB free{whose}"
    values: dict[str, Any] = {"total_gib": round(total, 2), "free_gib": round(free, 2), "limited": memory.limited}
    if expect.ram_gib is not None and total < expect.ram_gib:
        reason = f"{total:.1f} GiB{whose}, not {expect.ram_gib:g} GiB"
        return fail(reason, action="use a larger node, or raise the container's memory limit", **values)
    action = "end what else runs here (`ps aux --sort=-rss`), then rerun"
    if free < (FREE_FAIL_GIB if expect.ram_free_gib is None else expect.ram_free_gib):
        return fail(summary, action=action, **values)
    if expect.ram_free_gib is None and free < FREE_WARN_GIB:
        return warn(summary, action=action, **values)
    return ok(summary, **values)
