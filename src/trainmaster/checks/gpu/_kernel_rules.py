"""Meaning, severity and suggested action of each kind of kernel message that has no code of its own.

A fault that needs a repair fails. What the hardware corrected, or what ended by itself, warns, until there is so much
of it that the part is about to fail.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.checks import nvidia
from trainmaster.node.parse.kernel_events import KernelEvent, Kind
from trainmaster.node.parse.xid_catalog import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Meaning and action of a kind, and its severity by what the message tells of it."""

    meaning: str
    action: str
    severity: Severity = "fail"  # where the message does not tell; a message that tells "fatal" always fails
    mild: Severity = "warn"  # where the message tells "corrected", "non-fatal" or "recovered"
    least: int = 1  # fewer are normal
    grave: int | None = None  # from this many on it fails


_REBOOT = "drain the node and reboot it; have it repaired if it repeats"
_DISK = "drain the node; check and replace the disk"
_NIC = "drain the node and reset the adapter (mlxfwreset, where it is of NVIDIA); replace it if it repeats"
_SEAT = "reseat the device or its riser; replace it if it repeats"
_STORAGE = "see the file server and the network to it; remount, or drain the node"
MANY = 1000  # ours: a sound part has a few corrected errors in its uptime, a failing one thousands
EVENTS: dict[Kind, Rule] = {
    "gpu_crashed": Rule(meaning="the driver reports a crash of a GPU", action=_REBOOT),
    "gpu_lost": Rule(meaning="the driver lost a GPU, which does not answer on the bus", action=nvidia.POWER_CYCLE),
    "gpu_reset_required": Rule(
        meaning="the driver refuses work because a GPU must be reset",
        action="drain the node and reset its GPUs (nvidia-smi --gpu-reset), or reboot it",
    ),
    "gpu_init_failed": Rule(meaning="the driver could not start a GPU", action=_REBOOT),
    "nvlink_undetected": Rule(meaning="links of a GPU were not detected (NVLink)", action=_REBOOT),
    "peermem_error": Rule(
        meaning="nvidia-peermem reports an error (GPUDirect RDMA)",
        action="restart the job; if it repeats, update the NVIDIA driver and the driver of the adapters together",
        severity="warn",
    ),
    "nccl_crash": Rule(
        meaning="a program crashed inside NCCL",
        action="update NCCL and its network plugin; if only this node does it, run --level 2 on it",
        severity="warn",
    ),
    "driver_probe_failed": Rule(meaning="a driver could not bind its device", action=_REBOOT),
    "pcie_uncorrected": Rule(meaning="uncorrectable PCIe error", action=_SEAT, mild="fail"),
    "pcie_corrected": Rule(meaning="corrected PCIe errors", action=_SEAT, least=MANY),
    "pcie_link_down": Rule(meaning="a PCIe link went down", action=_SEAT, severity="warn"),
    "pcie_limited": Rule(meaning="a PCIe device has fewer lanes than it can use", action=_SEAT, severity="warn"),
    "pcie_reset_failed": Rule(meaning="a PCIe device does not answer after a reset", action=_REBOOT),
    "iommu_fault": Rule(
        meaning="the IOMMU refused an access of a device",
        action="update driver and firmware of the device, see the IOMMU settings (iommu=pt); reboot the node",
    ),
    "kernel_oops": Rule(meaning="kernel oops (the kernel's state is undefined from there on)", action=_REBOOT),
    "machine_check": Rule(
        meaning="machine check (error of CPU, memory or bus)",
        action="read `rasdaemon` or `mcelog`; have the named part replaced if it repeats",
        severity="warn",  # the announcement tells no severity; each uncorrected error has a line that does
        grave=MANY,
    ),
    "memory_uncorrected": Rule(meaning="uncorrectable memory error", action="replace the module that EDAC names"),
    "memory_corrected": Rule(meaning="corrected memory errors", action="watch the memory module", grave=MANY),
    "memory_poison": Rule(
        meaning="a memory page was lost to an uncorrectable error",
        action="drain the node and replace the module that EDAC or the BMC names",
    ),
    "nic_health": Rule(meaning="the network adapter reports an internal error", action=_NIC),
    "nic_command_timeout": Rule(meaning="the network adapter's firmware does not answer", action=_NIC),
    "nic_command_failed": Rule(meaning="the network adapter refused a command", action=_NIC),
    "nic_module": Rule(
        meaning="the adapter, its cable or its module reports an error",
        action="see its cooling; clean or replace the cable",
        severity="warn",
        grave=MANY,
    ),
    # Some lines each time; the driver restarts the queue.
    "nic_tx_timeout": Rule(meaning="a network queue stopped sending", action=_NIC, severity="warn", grave=30),
    # A message per CPU and five minutes; a short peak of the turbo clock gives a few.
    "cpu_hot": Rule(
        meaning="CPUs are slowed down by heat",
        action="check the fans and the airflow of the node",
        severity="warn",
        least=20,
    ),
    "soft_lockup": Rule(meaning="a CPU was stuck in the kernel", action=_REBOOT),
    "hard_lockup": Rule(meaning="a CPU was locked up", action=_REBOOT),
    "hung_task": Rule(
        meaning="a process hung in the kernel", action="see what it waits for (a mount, a driver); reboot the node"
    ),
    "filesystem_readonly": Rule(meaning="a file system was remounted read-only or shut down", action=_DISK),
    "filesystem_error": Rule(meaning="a file system reports an error", action=_DISK),
    "disk_error": Rule(meaning="a disk reports an error", action=_DISK, severity="warn", grave=MANY),
    "raid_degraded": Rule(meaning="a RAID array lost a disk", action="replace the disk and rebuild the array"),
    "storage_lost": Rule(meaning="a file server does not answer", action=_STORAGE),
    "storage_error": Rule(meaning="a network file system reports an error", action=_STORAGE, severity="warn"),
    "messages_suppressed": Rule(
        meaning="the kernel left out messages, which may report a fault",
        action="read what the named function reports elsewhere in the log",
        severity="warn",
    ),
}
OF_GPUS: tuple[Kind, ...] = ("gpu_crashed", "gpu_lost", "gpu_reset_required", "gpu_init_failed", "nvlink_undetected")
ENDED_BY_RESET: tuple[Kind, ...] = (*OF_GPUS, "pcie_uncorrected")  # of the GPU that was reset


def severity(rule: Rule, event: KernelEvent) -> Severity | None:
    """Severity of an event; None: too few to matter."""
    if event.count < rule.least:
        return None
    if event.recovered:
        return "warn"
    if event.fatal or (rule.grave is not None and event.count >= rule.grave):
        return "fail"
    return rule.mild if event.fatal is False else rule.severity
