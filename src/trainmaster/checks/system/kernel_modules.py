"""The kernel modules that the work needs are loaded. CUDA cannot start without nvidia_uvm, RDMA without ib_uverbs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainmaster.checks import system_files
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("kernel_modules",)
COMPARES = ()
METRICS: dict[str, str] = {}
# m_show of kernel/module/procfs.c: name, size, users, dependencies, state, address, taints.
_ROW = re.compile(r"[\w-]+ \d+ (?:-?\d+|-)(?: \S+)? (?:Live|Loading|Unloading) 0x[0-9a-f]+(?: \(\w+\))?\s*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    loaded: frozenset[str] | None  # None: this machine does not show its modules
    loadable: bool  # False: a kernel in one piece; what it does not show may be built in
    gpus: bool
    rdma: bool


def read(host: Host) -> Modules:
    shown = system_files.list_optional(host, "/sys/module")
    listed = system_files.read_optional(host, "/proc/modules")
    rows = (listed or "").splitlines()
    strange = next((row for row in rows if not _ROW.fullmatch(row)), None)
    if strange is not None:
        raise HostError(f"/proc/modules cannot be understood: {strange[:60]!r}")
    loaded = frozenset([*(shown or ()), *(row.split()[0] for row in rows)])
    return Modules(
        loaded=loaded if shown is not None or listed is not None else None,
        loadable=listed is not None,
        gpus=system_files.has_gpus(host),
        rdma=bool(system_files.list_optional(host, "/sys/class/infiniband")),
    )


def judge(modules: Modules, expect: Expect) -> list[Finding]:
    stated = [name.replace("-", "_") for name in expect.kernel_modules or ()]
    needed = dict.fromkeys(stated)
    if modules.gpus:
        needed |= dict.fromkeys(("nvidia", "nvidia_uvm"))
    if modules.rdma:
        needed |= dict.fromkeys(("ib_core", "ib_uverbs"))
    if not needed:
        proof = "/dev has no nvidia device, /sys/class/infiniband has none"
        return [skip("no GPU, no RDMA device and no module expected", proof=proof)]
    if modules.loaded is None:
        reason = f"this machine does not show its kernel modules; {', '.join(needed)} cannot be looked for"
        return [error(reason, action="make /sys/module readable")]
    missing = [name for name in needed if name not in modules.loaded]
    findings = [_judge_missing(name, modules, stated=name in stated) for name in missing]
    return findings or [ok(f"{', '.join(needed)} loaded", modules=list(needed))]


def _judge_missing(name: str, modules: Modules, *, stated: bool) -> Finding:
    action = f"load it (`modprobe {name}`) and name it in /etc/modules-load.d"
    reason = f"the kernel module {name} is not loaded"
    if not modules.loadable and modules.loaded is not None:
        # Its devices work or their own checks fail; this one cannot tell.
        unknown = f"this kernel has no loadable modules and does not show {name}"
        if not stated:
            return skip(unknown, proof="/proc/modules does not exist: modules are built in", device=name)
        return error(unknown, action="see that the kernel was built with it", device=name)
    # The driver's helper loads nvidia_uvm when CUDA first starts; after a boot it may not have been needed yet.
    return (fail if stated or name != "nvidia_uvm" else warn)(reason, action=action, device=name)
