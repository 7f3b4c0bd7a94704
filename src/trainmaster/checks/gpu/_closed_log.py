"""What stands in for a kernel log that this process may not read, and the faults that nothing in its place shows.

A container without CAP_SYSLOG gets no kernel message, and events of NVML begin when somebody asks for them: neither
tells of the past. Counters and flags do. Those of the GPUs are judged by their own checks; those of the kernel, which
/proc and /sys show to everybody, are judged here. A kind of message without a row in `SEEN_BY` is unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.checks import nvidia, system_files
from trainmaster.checks.gpu import _kernel_rules, gpu_recovery
from trainmaster.core.errors import HostError
from trainmaster.core.results import UNSEEN, Finding, fail, warn
from trainmaster.node.host import Host
from trainmaster.node.parse.kernel_events import Kind

TAINTED, MEMINFO, EDAC = "/proc/sys/kernel/tainted", "/proc/meminfo", "/sys/devices/system/edac/mc"
SYSLOG = 34  # CAP_SYSLOG, its bit in the sets of /proc/self/status (include/uapi/linux/capability.h)
# Flags that the kernel raises for good at the first such event (Documentation/admin-guide/tainted-kernels.rst).
TAINTS: Mapping[int, Kind] = {4: "machine_check", 7: "kernel_oops", 14: "soft_lockup"}
# Kind of message → what shows it without the log: a check of its own, or a file that is read here.
SEEN_BY: Mapping[Kind, str] = {
    "gpu_crashed": "gpu_recovery",
    "gpu_lost": "gpu_count",
    "gpu_init_failed": "gpu_count",
    "pcie_uncorrected": "aer_dev_fatal",
    "kernel_oops": TAINTED,
    "machine_check": TAINTED,
    "soft_lockup": TAINTED,
    "memory_uncorrected": EDAC,
    "memory_poison": MEMINFO,
    "filesystem_readonly": "mounts",
    "storage_lost": "mounts",
}
# Xids after which the driver asks for a reset are seen by gpu_recovery, those of memory by gpu_ecc, gpu_remap and
# gpu_retired, those of NVLink by gpu_nvlink, and a GPU off the bus by gpu_count.
_TRACELESS = "Xids that leave no counter and need no reset (13, 31, 43, 45 …)"
_BEFORE_RESET = "Xids after which the GPU needs a reset (62, 119, 120 …)"
_SXIDS = "SXids of NVSwitches"
_REFUSED = re.compile(r"not permitted|denied", re.IGNORECASE)
_ACTION = (
    "check the node as root, or give the container CAP_SYSLOG (docs/how/containers.md); "
    "`--strict` or `preflight.require: [xid]` refuses a node whose log is closed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """Evidence in place of the log. None: not shown here."""

    barred: bool  # no process here may ever read it: CAP_SYSLOG is not in the bounding set
    tainted: int | None
    corrupted_kb: int | None
    edac: Mapping[str, int] | None = None  # memory controller → uncorrected errors
    aer: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # bus address → fatal, non-fatal errors


def read(host: Host, gpus: nvidia.Gpus) -> Instead:
    status, memory = _text(host, "/proc/self/status"), _text(host, MEMINFO)
    bounding = re.search(r"^CapBnd:\s*([0-9a-f]{1,16})$", status, re.MULTILINE)
    corrupted = re.search(r"^HardwareCorrupted:\s*(\d{1,12}) kB$", memory, re.MULTILINE)
    errors = {bus: counted for bus in gpus.bus if (counted := _aer(host, bus)) is not None}
    return Instead(
        barred=bounding is not None and not int(bounding[1], 16) >> SYSLOG & 1,
        tainted=_number(_text(host, TAINTED)),
        corrupted_kb=int(corrupted[1]) if corrupted else None,
        edac=_edac(host),
        aer=errors,
    )


def is_refused(instead: Instead, trouble: str) -> bool:
    """Whether rights keep the log from this process. Where it only has no program to read it, that can be mended."""
    return instead.barred or _REFUSED.search(trouble) is not None


def judge(instead: Instead, gpus: nvidia.Gpus, devices: Mapping[str, str], trouble: str) -> list[Finding]:
    """Faults that the kernel's own counters show, then the warning that names what nothing shows."""
    return [*_faults(instead, devices), _warn(instead, gpus, trouble)]


def unseen(instead: Instead, gpus: nvidia.Gpus) -> list[str]:
    """Faults that nothing shows here, in words."""
    shown = {
        TAINTED: instead.tainted is not None,
        MEMINFO: instead.corrupted_kb is not None,
        EDAC: instead.edac is not None,
        "aer_dev_fatal": bool(instead.aer) and set(gpus.bus) <= set(instead.aer),
        "gpu_recovery": _asks(gpus),
    }
    kinds = [kind for kind in _kernel_rules.EVENTS if not (kind in SEEN_BY and shown.get(SEEN_BY[kind], True))]
    xids = [_TRACELESS, *([] if shown["gpu_recovery"] else [_BEFORE_RESET])]
    return [*xids, _SXIDS, *(kind.replace("_", " ") for kind in kinds)]


def _warn(instead: Instead, gpus: nvidia.Gpus, trouble: str) -> Finding:
    hidden = unseen(instead, gpus)
    reason = f"the kernel log is closed to this process ({trouble[:160]}): not seen are {', '.join(hidden)}"
    values: dict[str, Any] = {UNSEEN: hidden, "seen_by": sorted(set(SEEN_BY.values()))}
    return warn(reason, action=_ACTION, **values)


def _faults(instead: Instead, devices: Mapping[str, str]) -> Iterator[Finding]:
    for bit, kind in TAINTS.items():
        if (instead.tainted or 0) >> bit & 1:
            yield _fault(kind, f"{TAINTED} is {instead.tainted}, with bit {bit}")
    if instead.corrupted_kb:
        yield _fault("memory_poison", f"HardwareCorrupted is {instead.corrupted_kb} kB")
    for controller, count in (instead.edac or {}).items():
        if count:
            yield _fault("memory_uncorrected", f"{controller} counts {count}")
    for bus, (fatal, lesser) in instead.aer.items():
        if fatal or lesser:
            text, mild = f"{bus} counts {fatal} fatal and {lesser} non-fatal since boot", not fatal
            yield _fault("pcie_uncorrected", text, device=devices.get(bus, bus), mild=mild)


def _fault(kind: Kind, text: str, *, device: str | None = None, mild: bool = False) -> Finding:
    rule = _kernel_rules.EVENTS[kind]
    say = warn if mild or rule.severity == "warn" else fail
    return say(f"{rule.meaning}: {text}", action=rule.action, device=device, kind=kind)


def _asks(gpus: nvidia.Gpus) -> bool:
    """Whether every GPU reports what the driver asks for."""
    listed = gpus.smi.gpus if gpus.smi else ()
    flags = gpu_recovery.FLAGS[:1]
    return bool(listed) and all(gpu.reports(gpu_recovery.PATH) or gpu.reports(*flags) for gpu in listed)


def _aer(host: Host, bus: str) -> tuple[int, int] | None:
    """Uncorrected errors of a device since boot; None where the kernel keeps no count of it."""
    counts = []
    for kind in ("fatal", "nonfatal"):
        text = _text(host, f"{nvidia.PCI}/{bus}/aer_dev_{kind}")
        total = re.search(rf"^TOTAL_ERR_{kind.upper()} (\d{{1,18}})$", text, re.MULTILINE)
        if total is None:
            return None
        counts.append(int(total[1]))
    return counts[0], counts[1]


def _edac(host: Host) -> dict[str, int] | None:
    """Uncorrected errors by memory controller; None where no controller is watched."""
    try:
        names = [name for name in system_files.list_optional(host, EDAC) or () if re.fullmatch(r"mc\d+", name)]
    except HostError:
        return None
    counts = {name: _number(_text(host, f"{EDAC}/{name}/ue_count")) for name in names}
    known = {name: count for name, count in counts.items() if count is not None}
    return known if known and len(known) == len(counts) else None


def _text(host: Host, path: str) -> str:
    """Text of a file that need not be there: what it would show is then unseen."""
    try:
        return host.read(path)
    except HostError:
        return ""


def _number(text: str) -> int | None:
    word = text.strip()
    return int(word) if re.fullmatch(r"\d{1,18}", word, re.ASCII) else None
