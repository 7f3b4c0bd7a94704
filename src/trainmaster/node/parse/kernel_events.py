"""Kernel messages about faults other than Xid and SXid: one rule per kind, with the device concerned.

Message formats: arch/nvalloc/unix of NVIDIA/open-gpu-kernel-modules (adapter initialisation); in Linux
drivers/pci/pcie/aer.c and dpc.c, drivers/edac, arch/x86/kernel/cpu/mce, drivers/thermal/intel/therm_throt.c,
drivers/acpi/apei/ghes.c, mlx5/core/health.c and cmd.c, kernel/watchdog.c, kernel/hung_task.c, kernel/rcu/tree_stall.h,
fs/ext4, fs/xfs, fs/btrfs, block, mm/memory-failure.c, drivers/md, drivers/iommu, drivers/pci/pci.c,
arch/x86/mm/fault.c and kernel/dumpstack.c, net/sunrpc/clnt.c, lib/ratelimit.c; lustre/ptlrpc/import.c of Lustre.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainmaster.node.parse import shorten

Kind = Literal[
    "gpu_crashed",  # the driver reports a crash of a GPU or of its firmware without a code
    "gpu_lost",  # a call of the driver failed because the GPU does not answer on the bus
    "gpu_init_failed",  # the driver could not start a GPU; device None: the message names none
    "driver_probe_failed",  # a driver could not bind a PCI device
    "pcie_uncorrected",  # AER or DPC: an uncorrectable error on the link of a device
    "pcie_corrected",
    "pcie_link_down",  # hot-plug: the link of a slot went down
    "pcie_reset_failed",  # a device did not come back from a reset or from a low power state
    "iommu_fault",  # the IOMMU refused an access of a device
    "kernel_oops",  # Oops, BUG, general protection fault or panic of the kernel
    "machine_check",  # MCE, or firmware-reported (APEI); `fatal` tells uncorrected from corrected
    "memory_uncorrected",  # EDAC UE
    "memory_corrected",  # EDAC CE
    "memory_poison",  # a page was taken out of use after an uncorrectable memory error; `fatal` False: recovered
    "nic_health",  # mlx5: the device reported an internal error
    "nic_command_timeout",  # mlx5: the firmware did not answer a command
    "nic_module",  # mlx5: a cable or optical module reported an error, or the adapter is hot or short of power
    "nic_tx_timeout",  # a network queue did not send for seconds
    "nic_command_failed",  # EFA: the adapter refused a command
    "cpu_hot",  # a CPU was slowed down by heat
    "soft_lockup",  # also stalls of RCU and of a work queue
    "hard_lockup",
    "hung_task",  # a process in uninterruptible sleep for minutes
    "filesystem_readonly",  # remounted read-only or shut down after an error
    "filesystem_error",
    "disk_error",
    "raid_degraded",  # md: an array lost a disk
    "storage_lost",  # NFS or Lustre: the server does not answer or evicted this client; `recovered` if it came back
    "storage_error",  # another error of a network file system
    "messages_suppressed",  # the kernel left out messages of the function in `device`
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
    recovered: bool = False  # a later line reports the end of the fault


# A quick test before the rules: every message that a rule may match holds one of these words. Each alternative begins
# with a literal character, which lets `re` skip ordinary lines quickly.
WORDS = (
    r"RmInitAdapter|rm_init_adapter|NVIDIA (?:devices were|probe routine)|to your NVIDIA|probe (?:of|with)"
    r"|AER: |PCIe Bus|DPC: |pciehp|Hardware Error|Hardware error|Machine Check|EDAC |mlx5_core|mlx4_core"
    r"|lockup|LOCKUP|stall|blocked for more"
    r"|read-only|readonly|EXT4-fs |XFS \(|Aborting journal|BTRFS|I/O error|medium error|nvme nvme"
    r"|A GPU crash|GSP Timeout|GSP-CrashCat|_kgspLogXid|NV_ERR_GPU_IS_LOST"
    r"|necessary power cables|temperature |giving up|inaccessible|AMD-Vi|DMAR: |arm-smmu"
    r"|BUG: |BUG at|Oops|general protection|Kernel panic|Unable to handle kernel|corruption\."
    r"|Memory failure|md/raid|md: super|device-mapper|JBD2: Det|NETDEV WATCHDOG|efa |suppressed"
    r"|server |Lustre|CIFS: "
)
_PCI = (
    r"(?<![0-9a-fA-F:])(?P<domain>[0-9a-fA-F]{4,8}):(?P<bus>[0-9a-fA-F]{2}):(?P<slot>[0-9a-fA-F]{2})"
    r"(?:\.(?P<function>[0-7]))?"
)
_ADDRESS = re.compile(_PCI)
_SOURCE = re.compile(rf"received(?: from|:) {_PCI}")
_SHORT = re.compile(r"device[= ]\[?(?P<bus>[0-9a-fA-F]{2}):(?P<slot>[0-9a-fA-F]{2})\.(?P<function>[0-7])")
_NAMES = ("device", "nvme", "ext", "xfs", "btrfs", "md", "lustre", "buffer")  # groups that hold the name of a device
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


_LUSTRE = r"Lustre(?:Error)?: (?:\S+ )?(?P<lustre>[\w.-]{1,80}): "
# In this order; the first that matches decides.
_RULES = (
    _rule(
        "gpu_crashed",
        "crash|GSP|kgsp",
        r"NVRM:.*(?:A GPU crash dump has been created|GSP Timeout|GSP-CrashCat Report|_kgspLogXid1(?:19|20)\b)",
        fatal=True,
    ),
    _rule("gpu_lost", "GPU_IS_LOST", r"NVRM:.*\bNV_ERR_GPU_IS_LOST\b", fatal=True),
    _rule(
        "gpu_init_failed",
        "nit_adapter|InitAdapter|NVIDIA|power cables",
        r"NVRM:.*(?:RmInitAdapter failed|rm_init_adapter failed|RmInitAdapter: Cannot initialize)"
        r"|NVRM: (?:None of the NVIDIA devices were initialized|The NVIDIA probe routine failed)"
        r"|region assigned to your NVIDIA device is invalid"
        r"|NVRM:.*does not have the necessary power cables connected",
        fatal=True,
    ),
    _rule(
        "driver_probe_failed",
        "failed with error",
        # nvidia-gpu drives the USB-C port of some boards, which no job uses.
        r"\b(?:nvidia(?!-gpu)|mlx5_core|mlx4_core|efa|irdma|bnxt_\w+)\b.*"
        r"probe (?:of .* |with driver \S+ )?failed with error",
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
    _rule(
        "pcie_reset_failed",
        "giving up|inaccessible",
        r"not ready \d+ms after .{1,40}; giving up|change power state .*(?:device|config space) inaccessible",
        fatal=True,
    ),
    _rule(
        "iommu_fault",
        "AMD-Vi|DMAR|arm-smmu",
        r"AMD-Vi: Event logged \[(?:(?P<bad>IO_PAGE_FAULT|\w+_HARDWARE_ERROR)|(?P<good>\w+))"
        r"|AMD-Vi: (?P<corrected>Completion-Wait loop timed out)"
        r"|DMAR: \[(?:(?P<uncorrected>DMA )|(?P<nonfatal>INTR))"
        r"|arm-smmu\S* .*(?:event 0x[0-9a-f]+ received|context fault)",
    ),
    _rule(
        "kernel_oops",
        "BUG|Oops|general|panic|Unable|corruption",
        r"BUG: (?:unable to handle|kernel NULL pointer|Bad page|KASAN|stack guard page)|kernel BUG at "
        r"|\bOops(?:: |\[)|general protection fault(?:, |: [0-9a-f]{4} \[#)|Kernel panic - not syncing"
        r"|Unable to handle kernel |\blist_(?:add|del) corruption\.",
        device=None,
        fatal=True,
    ),
    _rule(
        "memory_poison",
        "Memory failure",
        r"Memory failure: 0x[0-9a-f]+: (?:recovery action for .*: (?P<good>Recovered|Delayed)"
        r"|(?P<corrected>already hardware poisoned))?",
        device=None,
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
    _rule(
        "nic_module",
        "mlx5_core",
        r"mlx5_core .*(?:Port module event\[error\]|Cable error|(?i:high temperature)|insufficient power)",
    ),
    _rule("nic_tx_timeout", "TX timeout|WATCHDOG", r"mlx[45]_core .*TX timeout|NETDEV WATCHDOG: .*timed out"),
    _rule("nic_command_failed", "efa ", r"\befa [0-9a-f:.]{7,16}: Failed to", fatal=False),
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
        r"|[Ii]nternal error|internal state error|error state|bad device|health recovery|mlx5_error_sw_reset|crdump)",
        fatal=True,
    ),
    _rule(
        "cpu_hot",
        "temperature",
        r"CPU\d+: (?:Core|Package) temperature (?:is )?above threshold, cpu clock (?:is )?throttled",
        device=None,
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
        "-only|readonly|hut|unmount",
        r"EXT4-fs \((?P<ext>[^)]{1,40})\): (?:Remounting filesystem read-only|shut down requested)"
        r"|XFS \((?P<xfs>[^)]{1,40})\): .*(?:[Ss]hutting down filesystem|has been shut down|[Ss]hutdown|Please unmount)"
        r"|BTRFS.*\(device (?P<btrfs>[^):]{1,40})[^)]*\).*forced readonly",
        device="file system",
        fatal=True,
    ),
    _rule(
        "filesystem_error",
        "EXT4|XFS|Aborting|BTRFS|JBD2",
        r"EXT4-fs error \(device (?P<ext>[^)]{1,40})\)"
        r"|XFS \((?P<xfs>[^)]{1,40})\): .*(?:[Cc]orrupt|I/O [Ee]rror|xfs_repair)"
        r"|EXT4-fs \((?P<buffer>[^)]{1,40})\): .*(?:(?P<good>error count since last fsck)|potential data loss"
        r"|Data will be lost|aborted journal)"
        r"|BTRFS (?:error|critical|warning(?=.* csum failed)|(?P<corrected>info)(?=.* errs: .*[1-9]))"
        r" \(device (?P<btrfs>[^):]{1,40})"
        r"|Aborting journal on device (?P<device>[^ .]{1,40})|JBD2: Detected IO errors",
        device="file system",
    ),
    _rule(
        "disk_error",
        "error|nvme|device-mapper",
        # fd0 and sr0 are drives without a medium.
        r"(?:I/O error|critical \w+ error), dev (?!fd\d|sr\d)(?P<device>[\w-]{1,40}),"
        r"|Buffer I/O error on dev(?:ice)? (?!fd\d|sr\d)(?P<buffer>[\w-]{1,40}),"
        r"|nvme (?P<nvme>nvme\d+): (?:I/O .*timeout|controller is down|Abort status"
        r"|(?P<bad>Removing after probe failure|Disabling device after reset failure|Device not ready; aborting))"
        r"|device-mapper: (?:raid|multipath|thin|integrity).*[Ff]ail",
        device="device",
    ),
    _rule(
        "raid_degraded",
        "md/raid|md: super",
        r"md/raid\w*:(?P<md>md\w{1,20}): .*(?:(?P<bad>Disk failure|not enough|[Tt]oo many|annot continue)"
        r"|(?P<good>active with (?!(?P<all>\d+) out of (?P=all)\b)\d+ out of \d+))|md: super_written gets error",
        device="device",
    ),
    _rule("storage_lost", "not resp", r"\bserver (?P<device>[\w.:\[\]-]{1,80}) not responding", device="device"),
    _rule(
        "storage_lost",
        "evicted|was lost",
        _LUSTRE + r"(?:This client was evicted by|Connection to .* was lost)",
        device="device",
    ),
    _rule("storage_error", "LustreError|CIFS: ", r"LustreError: |CIFS: .*has not responded", device=None),
    _rule(
        # The function names the suppressed messages. Audit records and notes of the network stack are no faults.
        "messages_suppressed",
        "suppressed",
        r"(?P<device>(?!kauditd|audit|net_ratelimit)\b[A-Za-z_]\w{1,60}): \d+ (?:callbacks|messages) suppressed",
        device="device",
    ),
)


def read_events(line: str, number: int) -> Iterator[KernelEvent]:
    """The fault that a line reports, if any. Times are filled in by the caller."""
    for rule in _RULES:
        match = rule.pattern.search(line) if any(word in line for word in rule.words) else None
        if match is not None:
            yield KernelEvent(
                kind=rule.kind,
                device=_device(rule, match, line),
                fatal=rule.fatal if rule.fatal is not None else _fatal(match, line),
                count=1,
                first=None,
                last=None,
                text=shorten(_message(line)),
                line=number,
            )
            return


_RECOVERED = (
    re.compile(r"\bserver (?P<device>[\w.:\[\]-]{1,80}) OK\b"),
    re.compile(_LUSTRE + r"Connection restored to"),
)


def read_recovery(line: str) -> tuple[Kind, str] | None:
    """Kind and device of a fault whose end a line reports."""
    for pattern in _RECOVERED:
        if (match := pattern.search(line)) is not None:
            return "storage_lost", shorten(match.group(1))
    return None


def read_address(line: str) -> str | None:
    """The first PCI address in a line, in the kernel's spelling; with its function where the line has one."""
    match = _ADDRESS.search(line)
    return None if match is None else _spell(match)


def _device(rule: _Rule, match: re.Match[str], line: str) -> str | None:
    if rule.device == "pci":
        source = _SOURCE.search(line)
        short = _SHORT.search(line)
        if source is None and read_address(line) is None and short is not None:
            return f"0000:{short['bus']}:{short['slot']}.{short['function']}".lower()
        return _spell(source) if source is not None else read_address(line)
    if rule.device is None:
        return None
    groups = match.groupdict()
    name = next((groups[name] for name in _NAMES if groups.get(name)), None)
    return None if name is None else shorten(re.sub(r"^(?:CPU#|cpu )", "CPU ", name.strip()))


def _fatal(match: re.Match[str], line: str) -> bool | None:
    """What the groups of a pattern tell about severity."""
    groups = match.groupdict()
    if groups.get("status"):
        return bool(int(groups["status"], 16) & _UNCORRECTED)
    if groups.get("bad") or groups.get("uncorrected") or groups.get("fatal") is not None:
        return True
    if groups.get("good") or groups.get("corrected") or groups.get("nonfatal"):
        return False
    if "Uncorrected hardware memory error" in line or "ERR_FATAL" in line:
        return True
    return None


def _spell(match: re.Match[str]) -> str:
    function = f".{match['function']}" if match["function"] else ""
    return f"{int(match['domain'], 16):04x}:{match['bus'].lower()}:{match['slot'].lower()}{function}"


def _message(line: str) -> str:
    """The line without its timestamp and host."""
    rest = line.partition("kernel: ")[2] or line
    return re.sub(r"^\s*(?:<\d{1,3}>)?(?:\[[^\]]{1,40}\]\s*|\d[^;]{1,60};)?", "", rest)
