"""Kernel messages about faults other than Xid and SXid: one rule per form of a message, with its source.

A rule states words of which every one of its messages holds one. They are the quick test before its pattern, and those
of all rules together (`WORDS`) are the test before all rules: a rule cannot stand behind words that drop its message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trainmaster.node.parse.kernel_line import HEAD

Kind = Literal[
    "gpu_crashed",  # the driver reports a crash of a GPU or of its firmware without a code
    "gpu_lost",  # a call of the driver failed because the GPU does not answer on the bus
    "gpu_reset_required",  # a call of the driver failed because the GPU must be reset first
    "gpu_init_failed",  # the driver could not start a GPU; device None: the message names none
    "nvlink_undetected",  # the links of a GPU did not get past receiver detection
    "peermem_error",  # nvidia-peermem, which lets adapters read GPU memory
    "nccl_crash",  # a program crashed inside NCCL
    "driver_probe_failed",  # a driver could not bind a PCI device
    "pcie_uncorrected",  # AER or DPC: an uncorrectable error on the link of a device
    "pcie_corrected",
    "pcie_link_down",  # hot-plug: the link of a slot went down
    "pcie_limited",  # a device of 16 lanes was found behind fewer of them
    "pcie_reset_failed",  # a device did not come back from a reset or from a low power state
    "iommu_fault",  # the IOMMU refused an access of a device
    "kernel_oops",  # Oops, BUG, general protection fault or panic of the kernel
    "machine_check",  # MCE, or firmware-reported (APEI); `fatal` tells uncorrected from corrected
    "memory_uncorrected",  # EDAC UE
    "memory_corrected",  # EDAC CE
    "memory_poison",  # a page was taken out of use after an uncorrectable memory error; `fatal` False: recovered
    "nic_health",  # mlx5: the device reported an internal error
    "nic_command_timeout",  # the firmware of a network adapter did not answer
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
class Rule:
    """`device`: "group" of the pattern, or "pci" for the address in the line. `fatal`: a fixed value, else a group."""

    kind: Kind
    words: tuple[str, ...]  # one of them is in every message of the rule: cheaper than the pattern
    pattern: re.Pattern[str]
    device: str | None
    fatal: bool | None


def _rule(kind: Kind, words: str, pattern: str, *, device: bool = True, fatal: bool | None = None) -> Rule:
    """A rule whose messages name a device, in a group of the pattern if it has one for that; or (False) name none."""
    compiled = re.compile(pattern)
    where = "group" if not compiled.groupindex.keys().isdisjoint(NAMES) else "pci"
    return Rule(
        kind=kind, words=tuple(words.split("|")), pattern=compiled, device=where if device else None, fatal=fatal
    )


NAMES = ("device", "nvme", "ext", "xfs", "btrfs", "md", "lustre", "buffer")  # groups that hold the name of a device
LUSTRE = r"Lustre(?:Error)?: (?:\S+ )?(?P<lustre>[\w.-]{1,80}): "  # lustre/ptlrpc/import.c of Lustre
# Functions whose suppressed messages are about audit records, the network stack, programs that crashed
# (arch/x86/mm/fault.c, arch/arm64/kernel/traps.c) or commands that a network adapter refused: none is a fault of the
# machine, and the first messages of each are in the log.
_HARMLESS = (
    r"(?:kauditd\w*|audit\w*|net_ratelimit|show_signal\w*|arm64_show_signal|show_unhandled_signals|mlx5_cmd_out_err)"
)
# In this order; the first that matches decides.
RULES = (
    # src/nvidia of NVIDIA/open-gpu-kernel-modules: kernel_gsp.c, and the status words of nvstatuscodes.h that end a
    # GPU's use. A call that fails through GSP prints the number of the status only (rpcRmApiAlloc_GSP).
    _rule(
        "gpu_crashed",
        "A GPU crash dump|GSP Timeout|GSP-CrashCat|_kgspLogXid1",
        rf"{HEAD}NVRM:.*(?:A GPU crash dump has been created|GSP Timeout|GSP-CrashCat Report|_kgspLogXid1(?:19|20)\b)",
        fatal=True,
    ),
    _rule(
        "gpu_lost",
        "NV_ERR_GPU_IS_LOST|tatus=0x0000000f",
        rf"{HEAD}NVRM:.*(?:\bNV_ERR_GPU_IS_LOST\b|[sS]tatus=0x0000000f\b)",
        fatal=True,
    ),
    _rule(
        "gpu_reset_required",
        "NV_ERR_|tatus=0x00000062|Reset required",
        rf"{HEAD}NVRM:.*(?:\bNV_ERR_(?:RESET_REQUIRED|FATAL_ERROR|ECC_ERROR|BROKEN_FB|THRESHOLD_CROSSED)\b"
        r"|[sS]tatus=0x00000062\b|Assertion failed: Reset required)",
        fatal=True,
    ),
    _rule(  # arch/nvalloc/unix of the same
        "gpu_init_failed",
        "nit_adapter failed|RmInitAdapter|NVIDIA devices were|NVIDIA probe routine|to your NVIDIA|power cables",
        rf"{HEAD}NVRM:.*(?:RmInitAdapter failed|rm_init_adapter failed|RmInitAdapter: Cannot initialize)"
        rf"|{HEAD}NVRM: (?:None of the NVIDIA devices were initialized|The NVIDIA probe routine failed)"
        r"|region assigned to your NVIDIA device is invalid"
        rf"|{HEAD}NVRM:.*does not have the necessary power cables connected",
        fatal=True,
    ),
    _rule(  # kernel_nvlink.c and arch/hopper/kernel_nvlink_gh100.c of the same
        "nvlink_undetected", "RxDet", rf"{HEAD}NVRM:.*(?:PostRxDet\w*|postRxDetLinkMask).*(?:[Ff]ailed)", fatal=True
    ),
    # peer_err of nvidia-peermem.c; the second is the module loader's, where it was built for other drivers
    _rule("peermem_error", "nvidia-peermem", rf"{HEAD}nvidia-peermem \w{{1,60}}:\d+ ERROR "),
    _rule("peermem_error", "peer", rf"{HEAD}(?:nvidia_peermem|nv_peer_mem): Unknown symbol "),
    _rule(  # show_signal_msg of arch/x86/mm/fault.c; do_error_trap of traps.c writes the second form
        "nccl_crash",
        "libnccl",
        r"(?P<device>[^\s\]:][^\]:]{0,40})\[\d+\]:? (?:segfault at |general protection|trap ).* in libnccl",
    ),
    _rule(  # drivers/base/dd.c
        "driver_probe_failed",
        "failed with error",
        # nvidia-gpu drives the USB-C port of some boards, which no job uses.
        r"\b(?:nvidia(?!-gpu)|mlx5_core|mlx4_core|efa|irdma|bnxt_\w+)\b.*"
        r"probe (?:of .* |with driver \S+ )?failed with error",
        fatal=True,
    ),
    _rule(  # drivers/pci/pcie/aer.c and dpc.c
        "pcie_corrected",
        "severity=Correct|AER: Correct|AER: Multiple Correct",
        r"severity=Correct(?:ed|able)|AER: (?:Multiple )?Correct(?:ed|able) error",
        fatal=False,
    ),
    _rule(
        "pcie_uncorrected",
        "Uncorrect|DPC: |AER: ",
        r"(?:severity=|AER: (?:Multiple )?)Uncorrect(?:ed|able) \((?:(?P<nonfatal>Non-)|(?P<fatal>))Fata"
        r"|DPC: (?:unmasked uncorrectable error|ERR_(?:FATAL|NONFATAL)|containment event)"
        r"|AER: .*(?:recovery failed|can't recover)",
    ),
    _rule(  # mlx5/core/main.c: PCI recovery began; the link is usable (1), frozen (2) or lost (3)
        "pcie_uncorrected",
        "mlx5_pci_err_detected",
        r"mlx5_core .*mlx5_pci_err_detected .*pci channel state = (?:(?P<nonfatal>1)|(?P<fatal>[23]))\b",
    ),
    _rule(
        # __pcie_print_link_status of drivers/pci/pci.c, at each boot. A lower speed is often the slot's, or that of a
        # GPU which sleeps; 2.5 GT/s x1 and "Unknown x0" are the ports that a hypervisor shows its guest.
        "pcie_limited",
        "limited by",
        r"available PCIe bandwidth, limited by (?!2\.5 GT/s PCIe x1 )[\d.]+ GT/s PCIe x(?:[1248]|12) link at "
        r".*\(capable of .* with (?:8|16|32|64)\.0 GT/s PCIe x16 link",
    ),
    _rule(  # drivers/pci/pci.c
        "pcie_reset_failed",
        "giving up|inaccessible",
        r"not ready \d+ms after .{1,40}; giving up|change power state .*(?:device|config space) inaccessible",
        fatal=True,
    ),
    _rule(  # drivers/iommu
        "iommu_fault",
        "AMD-Vi: |DMAR: [|arm-smmu",
        r"AMD-Vi: Event logged \[(?:(?P<bad>IO_PAGE_FAULT|\w+_HARDWARE_ERROR)|(?P<good>\w+))"
        r"|AMD-Vi: (?P<corrected>Completion-Wait loop timed out)"
        r"|DMAR: \[(?:(?P<uncorrected>DMA )|(?P<nonfatal>INTR))"
        r"|arm-smmu\S* .*(?:event 0x[0-9a-f]+ received|context fault)",
    ),
    _rule(  # arch/x86/mm/fault.c, kernel/dumpstack.c, lib/list_debug.c, kernel/panic.c
        "kernel_oops",
        "BUG: |BUG at|Oops|general protection|Kernel panic|Unable to handle kernel|corruption.",
        r"BUG: (?:unable to handle|kernel NULL pointer|Bad page|KASAN|stack guard page)|kernel BUG at "
        r"|\bOops(?:: |\[)|general protection fault(?:, |: [0-9a-f]{4} \[#)|Kernel panic - not syncing"
        r"|Unable to handle kernel |\blist_(?:add|del) corruption\.",
        device=False,
        fatal=True,
    ),
    _rule(  # mm/memory-failure.c
        "memory_poison",
        "Memory failure",
        r"Memory failure: 0x[0-9a-f]+: (?:recovery action for .*: (?P<good>Recovered|Delayed)"
        r"|(?P<corrected>already hardware poisoned))?",
        device=False,
    ),
    _rule("pcie_link_down", "pciehp", r"pciehp: Slot\([^)]*\): (?:Link Down|Card not present)"),
    _rule(  # arch/x86/kernel/cpu/mce/core.c (kill_me_maybe, kill_me_never) and drivers/acpi/apei/ghes.c
        "machine_check",
        "Hardware Error|Hardware error|Machine Check|achine check|hardware memory error|accessed poison",
        r"Machine Check(?: Exception)?: \d+ Bank \d+: (?P<status>[0-9a-fA-F]{16})"
        r"|\[Hardware Error\]: +event severity: (?:(?P<bad>fatal|recoverable|panic)|(?P<good>corrected|info))"
        r"|\[Hardware Error\]: (?:(?P<uncorrected>Uncorrected|Deferred|Fatal)|(?P<corrected>Corrected)) ?,? ?.*error"
        r"|(?P<fatal>Uncorrected hardware memory error|Kernel accessed poison)"
        r"|[Mm]achine check: |Hardware [Ee]rror.*Machine check events logged",
        device=False,
    ),
    _rule(  # drivers/edac/edac_mc.c
        "memory_uncorrected", "EDAC ", r"EDAC (?P<device>[\w# ]{0,20}MC#?\d+): .{0,40}?\d+ UE\b", fatal=True
    ),
    _rule("memory_corrected", "EDAC ", r"EDAC (?P<device>[\w# ]{0,20}MC#?\d+): .{0,40}?\d+ CE\b", fatal=False),
    _rule(  # mlx5/core/events.c
        "nic_module",
        "mlx5_core",
        r"mlx5_core .*(?:Port module event\[error\]|Cable error|(?i:high temperature)|insufficient power)",
    ),
    _rule("nic_tx_timeout", "TX timeout|NETDEV WATCHDOG", r"mlx[45]_core .*TX timeout|NETDEV WATCHDOG: .*timed out"),
    _rule("nic_command_failed", "efa ", r"\befa [0-9a-f:.]{7,16}: Failed to", fatal=False),
    _rule(  # mlx5/core/cmd.c and main.c (wait_fw_init), bnxt_hwrm.c and bnxt.c, efa_com.c, ena_netdev.c
        "nic_command_timeout",
        "mlx5_core|mlx4_core|bnxt_|efa |ena ",
        r"mlx[45]_core .*(?:timeout\. Will cause a leak|No done completion|canceled on out of queue timeout"
        r"|_exec_timeout|Firmware over \d+ MS in (?:pre-)?initializing state|Failed initializing command interface)"
        r"|\bbnxt_(?:en|re) .*(?:Firmware not responding|Error \(timeout: \d+\) msg)"
        r"|\befa [0-9a-f:.]{7,16}: .*(?:Wait for completion \(polling\) timeout|admin queue.* timeout)"
        r"|\bena [0-9a-f:.]{7,16}.*Keep alive watchdog timeout",
    ),
    _rule(  # mlx5/core/health.c
        "nic_health",
        "mlx5_core|mlx4_core",
        r"mlx[45]_core .*(?:[Ff]atal error|health compromised|print_health_info|assert_(?:var|exit_ptr|callra)"
        r"|[Ii]nternal error|internal state error|error state|bad device|health recovery|mlx5_error_sw_reset|crdump)",
        fatal=True,
    ),
    _rule(  # drivers/thermal/intel/therm_throt.c
        "cpu_hot",
        "temperature ",
        r"CPU\d+: (?:Core|Package) temperature (?:is )?above threshold, cpu clock (?:is )?throttled",
        device=False,
    ),
    _rule("hard_lockup", "LOCKUP", r"hard LOCKUP on (?P<device>cpu \d+)", fatal=True),
    _rule(  # kernel/watchdog.c, kernel/rcu/tree_stall.h
        "soft_lockup",
        "lockup|stall",
        r"BUG: soft lockup - (?P<device>CPU#\d+)|BUG: workqueue lockup|"
        r"rcu.*(?:self-detected stall|detected (?:expedited )?stalls)",
    ),
    _rule(  # kernel/hung_task.c
        "hung_task", "blocked for more", r"INFO: task (?P<device>.{1,64}?):\d+ blocked for more than \d+ seconds"
    ),
    _rule(  # fs/ext4/super.c, fs/xfs/xfs_fsops.c, fs/btrfs/messages.c
        "filesystem_readonly",
        "EXT4-fs (|XFS (|BTRFS",
        r"EXT4-fs \((?P<ext>[^)]{1,40})\): (?:Remounting filesystem read-only|shut down requested)"
        r"|XFS \((?P<xfs>[^)]{1,40})\): .*(?:[Ss]hutting down filesystem|has been shut down|[Ss]hutdown|Please unmount"
        r"|Remounting filesystem read-only)"
        r"|BTRFS.*\(device (?P<btrfs>[^):]{1,40})[^)]*\).*forced readonly",
        fatal=True,
    ),
    _rule(  # the same, fs/jbd2 and fs/btrfs/disk-io.c
        "filesystem_error",
        "EXT4-fs |XFS (|Aborting journal|BTRFS|JBD2: ",
        r"EXT4-fs error \(device (?P<ext>[^)]{1,40})\)"
        r"|XFS \((?P<xfs>[^)]{1,40})\): .*(?:[Cc]orrupt|I/O [Ee]rror|xfs_repair)"
        r"|EXT4-fs \((?P<buffer>[^)]{1,40})\): .*(?:(?P<good>error count since last fsck)|potential data loss"
        r"|Data will be lost|aborted journal|I/O error (?:while writing|to) superblock)"
        r"|BTRFS (?:error|critical|warning(?=.* (?:csum failed|lost (?:super block|page) write))"
        r"|(?P<corrected>info)(?=.* errs: .*[1-9])) \(device (?P<btrfs>[^):]{1,40})"
        r"|Aborting journal on device (?P<device>[^ .]{1,40})"
        r"|JBD2: (?:Detected IO errors|I/O error when updating journal superblock for (?P<md>[^ .]{1,40}))",
    ),
    _rule(  # block/blk-core.c and blk-mq.c, fs/buffer.c, drivers/nvme/host (pci.c, multipath.c), drivers/md/dm-*.c
        "disk_error",
        "I/O error|critical |nvme|device-mapper|beyond end of device",
        # fd0 and sr0 are drives without a medium.
        r"(?:I/O error|critical \w+ error), dev (?!fd\d|sr\d)(?P<device>[\w-]{1,40}),"
        r"|Buffer I/O error on dev(?:ice)? (?!fd\d|sr\d)(?P<buffer>[\w-]{1,40}),"
        r"|nvme (?P<nvme>nvme\d+): (?:I/O .*timeout|controller is down|Abort status"
        r"|(?P<bad>Removing after probe failure|Disabling device after reset failure|Device not ready; aborting))"
        r"|block (?P<md>nvme\w{1,20}): no (?:usable path|(?P<fatal>available path))"
        r"|attempt to access beyond end of device"
        r"|device-mapper: (?:raid|multipath|thin|integrity).*[Ff]ail",
    ),
    _rule(  # drivers/md: raid0.c and md-linear.c print no colon before the name of the array
        "raid_degraded",
        "md/raid|md/linear|md: super",
        r"md/(?:raid\d{0,2}|linear):?(?P<md>md\w{1,20}): "
        r".*(?:(?P<bad>Disk failure|not enough|[Tt]oo many|annot continue)"
        r"|(?P<good>active with (?!(?P<all>\d+) out of (?P=all)\b)\d+ out of \d+))|md: super_written gets error",
    ),
    _rule(  # net/sunrpc/clnt.c
        "storage_lost", "not responding", r"\bserver (?P<device>[\w.:\[\]-]{1,80}) not responding"
    ),
    _rule("storage_lost", "Lustre", LUSTRE + r"(?:This client was evicted by|Connection to .* was lost)"),
    _rule(
        "storage_error",
        "LustreError|CIFS: |Lock reclaim failed",
        r"LustreError: |CIFS: .*has not responded|nfs4_reclaim_open_state: Lock reclaim failed",
        device=False,
    ),
    _rule(  # lib/ratelimit.c; the function names the suppressed messages
        "messages_suppressed",
        "suppressed",
        rf"(?P<device>(?!{_HARMLESS}\b)\b[A-Za-z_]\w{{1,60}}): \d+ (?:callbacks|messages) suppressed",
    ),
)
_ENDED = ("server ", "Lustre")  # in messages that report the end of a fault
WORDS = "|".join(re.escape(word) for word in dict.fromkeys((*(word for rule in RULES for word in rule.words), *_ENDED)))
