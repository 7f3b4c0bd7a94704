"""Shared memory (/dev/shm) is large enough. Data loaders and NCCL use it and die of a bus error when it is full."""

from __future__ import annotations

from typing import Any

from trainmaster.core.errors import FileMissing
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Disk, Host

LEVEL = 1
GPU = False
EXPECTS = ("shm_gib",)
COMPARES = ()
METRICS: dict[str, str] = {}
GIB = 1 << 30
WARN_GIB = 1.0  # containers get 64 MiB unless told otherwise, and NCCL alone wants about 33 MB per pair of GPUs


def read(host: Host) -> Disk | None:
    try:
        return host.disk("/dev/shm")  # noqa: S108 (it is looked at, nothing is written there)
    except FileMissing:
        return None


def judge(shm: Disk | None, expect: Expect) -> Finding:
    action = "start the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir of medium Memory)"
    if shm is None:
        return fail("there is no /dev/shm", action=action)
    total, free = shm.total_bytes / GIB, shm.free_bytes / GIB
    summary = f"{free:.2f} of {total:.2f} GiB free"
    values: dict[str, Any] = {"total_gib": round(total, 3), "free_gib": round(free, 3)}
    if expect.shm_gib is not None and total < expect.shm_gib:
        return fail(f"{total:.2f} GiB, not {expect.shm_gib:g} GiB", action=action, **values)
    if free < WARN_GIB:
        if total >= WARN_GIB:
            action = "remove what earlier processes left in /dev/shm"
        return warn(summary, action=action, **values)
    return ok(summary, **values)
