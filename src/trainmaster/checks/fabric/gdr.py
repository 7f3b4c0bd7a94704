"""Network adapters reach GPU memory directly (GPUDirect RDMA). Otherwise every byte goes through host memory.

Two mechanisms: a peer-memory module, or DMA-BUF, which needs Linux 5.12 and NVIDIA's open kernel modules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("gdr",)
COMPARES = ()
METRICS: dict[str, str] = {}
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gdr:
    gpus: bool
    rdma: bool
    modules: tuple[str, ...] | None  # peer-memory modules that are loaded; None: this machine shows none at all
    kernel: tuple[int, int] | None
    open_driver: bool | None  # None: the driver does not tell


def read(host: Host) -> Gdr:
    shown = system_files.list_optional(host, "/sys/module")
    driver = system_files.read_optional(host, "/proc/driver/nvidia/version")
    release = host.read("/proc/sys/kernel/osrelease").strip()
    match = re.fullmatch(r"(\d+)\.(\d+)[\w.+-]*", release, flags=re.ASCII)
    if match is None:
        raise HostError(f"the kernel release is {release[:40]!r}")
    if driver is not None and not re.search(r"Kernel Module.* \d{3}\.\d", driver):
        raise HostError("/proc/driver/nvidia/version names no driver version")
    return Gdr(
        gpus=system_files.has_gpus(host),
        rdma=bool(system_files.list_optional(host, "/sys/class/infiniband")),
        modules=None if shown is None else tuple(name for name in PEER_MODULES if name in shown),
        kernel=(int(match[1]), int(match[2])) if match else None,
        open_driver=None if driver is None else "Open Kernel Module" in driver,
    )


def judge(gdr: Gdr, expect: Expect) -> Finding:
    if expect.gdr is False:
        return skip("the profile expects no GPUDirect RDMA", proof="gdr=false is stated")
    values: dict[str, Any] = {
        "modules": list(gdr.modules or ()),
        "kernel": ".".join(map(str, gdr.kernel)) if gdr.kernel else None,
        "open_driver": gdr.open_driver,
    }
    if not gdr.gpus or not gdr.rdma:
        missing = "RDMA device" if gdr.gpus else "GPU"
        if expect.gdr:
            return fail(f"there is no {missing} here for GPUDirect RDMA", action="see gpu_count, ib_ports and efa")
        where = "/sys/class/infiniband is empty or absent" if gdr.gpus else "/dev has no nvidia device"
        return skip(f"no {missing} here for GPUDirect RDMA", proof=where)
    if gdr.modules:
        return ok(f"by {gdr.modules[0]}", **values)
    if gdr.kernel is not None and gdr.kernel >= (5, 12) and gdr.open_driver:
        return ok("by DMA-BUF: Linux 5.12 or later and NVIDIA's open kernel modules", **values)
    action = "load nvidia_peermem (`modprobe nvidia_peermem`) and name it in /etc/modules-load.d"
    if gdr.modules is None or gdr.open_driver is None:
        return error("kernel modules and driver type are not visible here", action=action, **values)
    reason = "no peer-memory module is loaded, and DMA-BUF needs Linux 5.12 and NVIDIA's open kernel modules"
    return (fail if expect.gdr else warn)(reason, action=action, **values)
