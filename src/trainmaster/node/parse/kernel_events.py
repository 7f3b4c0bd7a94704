"""Kernel messages about faults other than Xid and SXid: one rule per kind, with the device concerned.

Message formats: arch/nvalloc/unix of NVIDIA/open-gpu-kernel-modules (adapter initialisation); in Linux
drivers/pci/pcie/aer.c and dpc.c, drivers/edac, arch/x86/kernel/cpu/mce, drivers/acpi/apei/ghes.c, mlx5/core/health.c
and cmd.c, kernel/watchdog.c, kernel/hung_task.c, kernel/rcu/tree_stall.h, fs/ext4, fs/xfs, fs/btrfs, block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainmaster.node.parse import shorten

Kind = Literal[
    "gpu_init_failed",  # the driver could not start a GPU; device None: the message names none
    "driver_probe_failed",  # a driver could not bind a PCI device
    "pcie_uncorrected",  # AER or DPC: an uncorrectable error on the link of a device
    "pcie_corrected",
    "pcie_link_down",  # hot-plug: the link of a slot went down
    "machine_check",  # MCE, or firmware-reported (APEI); `fatal` tells uncorrected from corrected
    "memory_uncorrected",  # EDAC UE
    "memory_corrected",  # EDAC CE
    "nic_health",  # mlx5: the device reported an internal error
    "nic_command_timeout",  # mlx5: the firmware did not answer a command
    "nic_module",  # mlx5: a cable or optical module reported an error
    "soft_lockup",  # also stalls of RCU and of a work queue
    "hard_lockup",
    "hung_task",  # a process in uninterruptible sleep for minutes
    "filesystem_readonly",  # remounted read-only or shut down after an error
    "filesystem_error",
    "disk_error",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvent:
    """One kind of fault on one device. Times are as in the log; `line` is the number of its last line, from 1."""

    kind: Kind
    device: str | None  # "0000:3b:00.0", "CPU 12", "nvme0n1", a process; None: the message names none
    fatal: bool | None  # None: the message does not tell
    count: int
    first: str | None
    last: str | None
    text: str
    line: int


# A quick test before the rules: every message that a rule may match holds one of these words. Each alternative begins
# with a literal character, which lets `re` skip ordinary lines quickly.
WORDS = (
    r"RmInitAdapter|rm_init_adapter|NVIDIA (?:devices were|probe routine)|to your NVIDIA|probe (?:of|with)"
    r"|AER: |PCIe Bus|DPC: |pciehp|Hardware Error|Hardware error|Machine Check|EDAC |mlx5_core|mlx4_core"
    r"|lockup|LOCKUP|stall|blocked for more"
    r"|read-only|readonly|EXT4-fs err|XFS \(|Aborting journal|BTRFS|I/O error|medium error|nvme nvme"
)
_PCI = (
    r"(?<![0-9a-fA-F:])(?P<domain>[0-9a-fA-F]{4,8}):(?P<bus>[0-9a-fA-F]{2}):(?P<slot>[0-9a-fA-F]{2})"
    r"(?:\.(?P<function>[0-7]))?"
)
_ADDRESS = re.compile(_PCI)
_SOURCE = re.compile(rf"received(?: from|:) {_PCI}")
_UNCORRECTED = 1 << 61  # the UC bit of IA32_MCi_STATUS (Intel SDM volume 3B, 15.3.2.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """`device`: a group of the pattern, or "pci" for the PCI address in the line. `fatal`: a fixed value or a group."""

    kind: Kind
    words: tuple[str, ...]  # one of them is in every message of the kind: cheaper than the pattern
    pattern: re.Pattern[str]
    device: str | None = "pci"
    fatal: bool | None = None


def _rule(kind: Kind, words: str, pattern: str, *, device: str | None = "pci", fatal: bool | None = None) -> _Rule:
    return _Rule(kind=kind, words=tuple(words.split("|")), pattern=re.compile(pattern), device=device, fatal=fatal)


# In this order; the first that matches decides.
_RULES = (
    _rule(
        "gpu_init_failed",
        "nit_adapter|InitAdapter|NVIDIA",
        r"NVRM:.*(?:RmInitAdapter failed|rm_init_adapter failed|RmInitAdapter: Cannot initialize)"
        r"|NVRM: (?:None of the NVIDIA devices were initialized|The NVIDIA probe routine failed)"
        r"|region assigned to your NVIDIA device is invalid",
        fatal=True,
    ),
    _rule(
        "driver_probe_failed",
        "failed with error",
        r"\b(?:nvidia|mlx5_core|mlx4_core|efa|irdma|bnxt_\w+)\b.*probe (?:of .* |with driver \S+ )?failed with error",
        fatal=True,
    ),
    _rule(
        "pcie_corrected",
        "Correct",
        r"severity=Correct(?:ed|able)|AER: (?:Multiple )?Correct(?:ed|able) error",
        fatal=False,
    ),
    _rule(
        "pcie_uncorrected",
        "Uncorrect|DPC: |recover",
        r"(?:severity=|AER: (?:Multiple )?)Uncorrect(?:ed|able) \((?:(?P<nonfatal>Non-)|(?P<fatal>))Fata"
        r"|DPC: (?:unmasked uncorrectable error|ERR_(?:FATAL|NONFATAL)|containment event)"
        r"|AER: .*(?:recovery failed|can't recover)",
    ),
    _rule("pcie_link_down", "pciehp", r"pciehp: Slot\([^)]*\): (?:Link Down|Card not present)"),
    _rule(
        "machine_check",
        "ardware |achine ",
        r"Machine Check(?: Exception)?: \d+ Bank \d+: (?P<status>[0-9a-fA-F]{16})"
        r"|\[Hardware Error\]: +event severity: (?:(?P<bad>fatal|recoverable|panic)|(?P<good>corrected|info))"
        r"|\[Hardware Error\]: (?:(?P<uncorrected>Uncorrected|Deferred|Fatal)|(?P<corrected>Corrected)) ?,? ?.*error"
        r"|[Mm]achine check: |Hardware [Ee]rror.*Machine check events logged|Uncorrected hardware memory error",
        device=None,
    ),
    _rule(
        "memory_uncorrected",
        " UE ",
        r"EDAC (?P<device>[\w# ]{0,20}MC#?\d+): .{0,40}?\d+ UE\b",
        device="device",
        fatal=True,
    ),
    _rule(
        "memory_corrected",
        " CE ",
        r"EDAC (?P<device>[\w# ]{0,20}MC#?\d+): .{0,40}?\d+ CE\b",
        device="device",
        fatal=False,
    ),
    _rule("nic_module", "mlx5_core", r"mlx5_core .*(?:Port module event\[error\]|Cable error|High Temperature)"),
    _rule(
        "nic_command_timeout",
        "timeout|No done",
        r"mlx[45]_core .*(?:timeout\. Will cause a leak|No done completion|canceled on out of queue timeout"
        r"|_exec_timeout)",
    ),
    _rule(
        "nic_health",
        "mlx5_core|mlx4_core",
        r"mlx[45]_core .*(?:[Ff]atal error|health compromised|print_health_info|assert_(?:var|exit_ptr|callra)"
        r"|[Ii]nternal error|internal state error|error state|bad device|health recovery|mlx5_error_sw_reset|crdump"
        r"|insufficient power)",
        fatal=True,
    ),
    _rule("hard_lockup", "LOCKUP", r"hard LOCKUP on (?P<device>cpu \d+)", device="device", fatal=True),
    _rule(
        "soft_lockup",
        "lockup|stall",
        r"BUG: soft lockup - (?P<device>CPU#\d+)|BUG: workqueue lockup|"
        r"rcu.*(?:self-detected stall|detected (?:expedited )?stalls)",
        device="device",
    ),
    _rule(
        "hung_task",
        "blocked for",
        r"INFO: task (?P<device>.{1,64}?):\d+ blocked for more than \d+ seconds",
        device="device",
    ),
    _rule(
        "filesystem_readonly",
        "-only|readonly|hut",
        r"EXT4-fs \((?P<ext>[^)]{1,40})\): Remounting filesystem read-only"
        r"|XFS \((?P<xfs>[^)]{1,40})\): .*(?:Shutting down filesystem|has been shut down|Shutdown)"
        r"|BTRFS.*\(device (?P<btrfs>[^):]{1,40})[^)]*\).*forced readonly",
        device="file system",
        fatal=True,
    ),
    _rule(
        "filesystem_error",
        "EXT4|XFS|Aborting",
        r"EXT4-fs error \(device (?P<ext>[^)]{1,40})\)|XFS \((?P<xfs>[^)]{1,40})\): .*(?:[Cc]orrupt|I/O [Ee]rror)"
        r"|Aborting journal on device (?P<btrfs>[^ .]{1,40})",
        device="file system",
    ),
    _rule(
        "disk_error",
        "error, dev|nvme",
        r"(?:I/O error|critical \w+ error), dev (?P<device>[\w-]{1,40}),"
        r"|nvme (?P<nvme>nvme\d+): (?:I/O .*timeout|controller is down|Abort status|Removing after probe failure)",
        device="device",
    ),
)


def read_events(line: str, number: int) -> Iterator[KernelEvent]:
    """The fault that a line reports, if any. Times are filled in by the caller."""
    for rule in _RULES:
        found = rule.pattern.search(line) if any(word in line for word in rule.words) else None
        if found is not None:
            yield KernelEvent(
                kind=rule.kind,
                device=_device(rule, found, line),
                fatal=rule.fatal if rule.fatal is not None else _fatal(found, line),
                count=1,
                first=None,
                last=None,
                text=shorten(_message(line)),
                line=number,
            )
            return


def read_address(line: str) -> str | None:
    """The first PCI address in a line, in the kernel's spelling; with its function where the line has one."""
    found = _ADDRESS.search(line)
    return None if found is None else _spell(found)


def _device(rule: _Rule, found: re.Match[str], line: str) -> str | None:
    if rule.device == "pci":
        source = _SOURCE.search(line)
        return _spell(source) if source is not None else read_address(line)
    if rule.device is None:
        return None
    groups = found.groupdict()
    name = next((groups[name] for name in ("device", "nvme", "ext", "xfs", "btrfs") if groups.get(name)), None)
    return None if name is None else shorten(re.sub(r"^(?:CPU#|cpu )", "CPU ", name.strip()))


def _fatal(found: re.Match[str], line: str) -> bool | None:
    """What the groups of a pattern tell about severity."""
    groups = found.groupdict()
    if groups.get("status"):
        return bool(int(groups["status"], 16) & _UNCORRECTED)
    if groups.get("bad") or groups.get("uncorrected") or groups.get("fatal") is not None:
        return True
    if groups.get("good") or groups.get("corrected") or groups.get("nonfatal"):
        return False
    if "Uncorrected hardware memory error" in line or "ERR_FATAL" in line:
        return True
    return None


def _spell(found: re.Match[str]) -> str:
    function = f".{found['function']}" if found["function"] else ""
    return f"{int(found['domain'], 16):04x}:{found['bus'].lower()}:{found['slot'].lower()}{function}"


def _message(line: str) -> str:
    """The line without its timestamp and host."""
    rest = line.partition("kernel: ")[2] or line
    return re.sub(r"^\s*(?:<\d{1,3}>)?(?:\[[^\]]{1,40}\]\s*|\d[^;]{1,60};)?", "", rest)
