"""Kernel messages without an Xid: each kind of fault is found, with its device; a healthy boot has none."""

from __future__ import annotations

import pytest

from trainmaster.node.parse import kernel_line, kernel_log
from trainmaster.node.parse.kernel_log import KernelLog

FALLEN = """\
[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0
               NVRM: (PCI ID: 10de:26b5) installed in this system has
               NVRM: fallen off the bus and is not responding to commands.
"""
ACTION = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from"
BOOT = """\
[    0.000000] Linux version 6.8.0-1021-nvidia (buildd@bos03) (gcc 13.2.0)
[    0.000000] Write protecting the kernel read-only data: 28672k
[    0.410000] mce: CPU0: Thermal monitoring enabled (TM1)
[    0.510000] EDAC MC: Ver: 3.0.0
[    1.100000] pcieport 0000:30:01.0: AER: enabled with IRQ 35
[    2.200000] pciehp: Slot(1-1) powered on
[    3.000000] EDAC MC0: Giving out device to module i10nm_edac controller
[    3.100000] RAS: Correctable Errors collector initialized.
[    4.000000] EXT4-fs (nvme0n1p1): mounted filesystem with ordered data mode. Opts: errors=remount-ro
[    4.200000] XFS (nvme1n1): Mounting V5 Filesystem
[    4.300000] XFS (nvme1n1): Ending clean mount
[    5.000000] mlx5_core 0000:5e:00.0: firmware version: 28.39.1002
[    5.100000] mlx5_core 0000:5e:00.0: 504.112 Gb/s available PCIe bandwidth (32.0 GT/s PCIe x16 link)
[    5.200000] mlx5_core 0000:5e:00.0: Port module event: module 0, Cable plugged
[    6.000000] nvme nvme0: 32/0/0 default/read/poll queues
[    7.000000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.133.20
[    8.000000] rcu: Hierarchical SRCU implementation.
[    8.100000] md/raid1:md0: active with 2 out of 2 mirrors
[    8.200000] BTRFS info (device nvme2n1): bdev /dev/nvme2n1 errs: wr 0, rd 0, flush 0, corrupt 0, gen 0
[    8.300000] DMAR: IOMMU enabled
[    8.400000] DMAR: [Firmware Bug]: No firmware reserved region can cover this RMRR
[    8.500000] AMD-Vi: Interrupt remapping enabled
[    8.600000] I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0
[    8.700000] Lustre: Mounted fsx-client
[    8.800000] EXT4-fs (nvme0n1p1): re-mounted 0a1b r/w. Quota mode: none.
[    9.000000] kauditd_printk_skb: 24 callbacks suppressed
[    9.100000] net_ratelimit: 12 callbacks suppressed
[    9.200000] traps: python[4321] general protection fault ip:7f0 sp:7f1 error:0 in libc.so.6
[    9.300000] pci 0000:5e:00.0: not ready 1023ms after FLR; waiting
[    9.400000] efa 0000:00:1d.0: Setup irq:35 name:efa-mgmnt
[    9.500000] mlx5_core 0000:05:00.0: mlx5_cmd_out_err:839:(pid 77): ACCESS_REG(0x805) op_mod(0x1) failed, status
[    9.500001] mlx5_cmd_out_err: 16 callbacks suppressed
[    9.600000] show_signal_msg: 18 callbacks suppressed
[    9.600001] GpuWatchdog[2955]: segfault at 0 ip 00007fd0eaf929a6 sp 00007fd0 error 6 in libcef.so[7fd0e]
[    9.800000] nvidia_peermem: module uses symbols nvidia_p2p_get_pages from proprietary module nvidia
[    9.900000] md/raid0:md1: md_size is 7501211648 sectors.
[    9.900001] mlx5_core 0000:5e:00.0: wait_fw_init:199:(pid 12): Waiting for FW initialization, timeout abort in 100s
"""


def parse(text: str) -> KernelLog:
    return kernel_log.parse(text)


def only(text: str) -> tuple[str, str | None, bool | None]:
    (event,) = parse(text).events
    return event.kind, event.device, event.fatal


def test_a_healthy_boot_has_no_event() -> None:
    log = parse(BOOT)
    assert (log.events, log.xids, log.from_boot, log.lost) == ((), (), True, 0)


@pytest.mark.parametrize(
    "text",
    [
        FALLEN,
        FALLEN.replace("               NVRM", "[ 1843.308146] NVRM"),
        FALLEN.replace("(PCI ID: 10de:26b5) ", ""),
        FALLEN.replace("NVRM: (PCI", "audit: type=1400 between\n NVRM: (PCI"),
        "[1.5] NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:1e07) installed in this\n"
        "[1.5] NVRM: system has fallen off the bus and is not responding to commands.",
        "Mar  3 12:00:01 n7 kernel: NVRM: The NVIDIA GPU 0000:b3:00.0 installed in this system has fallen off the bus.",
        "NVRM: GPU at 0000:b3:00.0 has fallen off the bus.",
    ],
)
def test_a_sentence_over_several_lines_names_its_gpu(text: str) -> None:
    (xid,) = parse(text).xids
    assert (xid.device, xid.code, xid.implied) == ("0000:b3:00", 79, True)


def test_two_lost_gpus_are_two() -> None:
    log = parse(FALLEN + FALLEN.replace("b3", "b4"))
    assert [xid.device for xid in log.xids] == ["0000:b3:00", "0000:b4:00"]


def test_a_lost_gpu_without_an_address_is_not_dropped() -> None:
    (xid,) = parse("[9.1] NVRM: GPU has fallen off the bus").xids
    assert (xid.device, xid.code) == ("unknown", 79)


def test_a_lost_gpu_with_its_xid_is_counted_once() -> None:
    text = "NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.\nNVRM: GPU has fallen off the bus\n" + FALLEN
    (xid,) = parse(text).xids
    assert not xid.implied


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2393)", ("gpu_init_failed", "0000:3b:00.0", True)),
        (
            "NVRM: GPU 0000:3b:00.0: rm_init_adapter failed, device minor number 0",
            ("gpu_init_failed", "0000:3b:00.0", True),
        ),
        ("NVRM: GPU0 RmInitAdapter: Cannot initialize GSP firmware RM", ("gpu_init_failed", None, True)),
        ("NVRM: None of the NVIDIA devices were initialized.", ("gpu_init_failed", None, True)),
        (
            "nvidia 0000:02:00.0: probe with driver nvidia failed with error -1",
            ("driver_probe_failed", "0000:02:00.0", True),
        ),
        ("mlx5_core: probe of 0000:5e:00.0 failed with error -110", ("driver_probe_failed", "0000:5e:00.0", True)),
        (
            "pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
            ("pcie_uncorrected", "0000:3b:00.0", True),
        ),
        (
            "pcieport 0000:00:07.1: AER: Multiple Uncorrectable (Non-Fatal) error message received from 0000:5e:00.0",
            ("pcie_uncorrected", "0000:5e:00.0", False),
        ),
        (
            "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
            ("pcie_uncorrected", "0000:3b:00.0", True),
        ),
        (
            "igb 0000:41:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fata)",
            ("pcie_uncorrected", "0000:41:00.0", False),
        ),
        (
            "pcieport 0000:30:03.0: DPC: containment event, status:0x0005 source:0x3400",
            ("pcie_uncorrected", "0000:30:03.0", None),
        ),
        (
            "mlx5_core 0000:5e:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
            ("pcie_corrected", "0000:5e:00.0", False),
        ),
        ("pcieport 0000:3a:00.0: pciehp: Slot(8): Link Down", ("pcie_link_down", "0000:3a:00.0", None)),
        (
            "mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: 8c00004000010091",
            ("machine_check", None, False),
        ),
        ("mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 5: be00000000800400", ("machine_check", None, True)),
        ("mce: [Hardware Error]: Machine check events logged", ("machine_check", None, None)),
        ("{1}[Hardware Error]: event severity: fatal", ("machine_check", None, True)),
        ("{1}[Hardware Error]: event severity: corrected", ("machine_check", None, False)),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0", ("memory_uncorrected", "MC0", True)),
        ("EDAC MC2: 32768 CE memory scrubbing error on CPU_SrcID#1_Ha#0", ("memory_corrected", "MC2", False)),
        (
            "mlx5_core 0000:5e:00.0: poll_health:825:(pid 0): Fatal error 3 detected",
            ("nic_health", "0000:5e:00.0", True),
        ),
        (
            "mlx5_core 0000:5e:00.0: poll_health:830: device's health compromised - reached miss count",
            ("nic_health", "0000:5e:00.0", True),
        ),
        (
            "mlx5_core 0000:5e:00.0: wait_func: DESTROY_EQ(0x302) timeout. Will cause a leak of a command resource",
            ("nic_command_timeout", "0000:5e:00.0", None),
        ),
        (
            "mlx5_core 0000:5e:00.0: Port module event[error]: module 0, Cable error, Bus stuck",
            ("nic_module", "0000:5e:00.0", None),
        ),
        ("watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python:1234]", ("soft_lockup", "CPU 12", None)),
        ("rcu: INFO: rcu_preempt self-detected stall on CPU", ("soft_lockup", None, None)),
        ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3", ("hard_lockup", "CPU 3", True)),
        ("INFO: task python:4321 blocked for more than 120 seconds.", ("hung_task", "python", None)),
        (
            "EXT4-fs (nvme0n1p1): Remounting filesystem read-only",
            ("filesystem_readonly", "nvme0n1p1", True),
        ),
        (
            "XFS (dm-0): Corruption of in-memory data detected.  Shutting down filesystem",
            ("filesystem_readonly", "dm-0", True),
        ),
        (
            "BTRFS info (device sda1: state E): forced readonly",
            ("filesystem_readonly", "sda1", True),
        ),
        ("EXT4-fs error (device sda2): ext4_find_entry:1455: inode #2", ("filesystem_error", "sda2", None)),
        ("blk_update_request: I/O error, dev nvme1n1, sector 123 op 0x0", ("disk_error", "nvme1n1", None)),
        ("nvme nvme0: I/O 12 QID 3 timeout, aborting", ("disk_error", "nvme0", None)),
        ("nvme nvme0: Disabling device after reset failure: -19", ("disk_error", "nvme0", True)),
        ("Buffer I/O error on dev sda1, logical block 9, lost async page write", ("disk_error", "sda1", None)),
        ("NVRM: A GPU crash dump has been created.", ("gpu_crashed", None, True)),
        ("NVRM: _kgspLogXid119: ****** GSP Timeout ******", ("gpu_crashed", None, True)),
        ("vfio-pci 0000:3b:00.0: not ready 65535ms after FLR; giving up", ("pcie_reset_failed", "0000:3b:00.0", True)),
        (
            "mlx5_core 0000:5e:00.0: Unable to change power state from D3cold to D0, device inaccessible",
            ("pcie_reset_failed", "0000:5e:00.0", True),
        ),
        (
            "AMD-Vi: Event logged [IO_PAGE_FAULT device=3b:00.0 domain=0x0021 address=0x0 flags=0x0000]",
            ("iommu_fault", "0000:3b:00.0", True),
        ),
        (
            "nvidia 0000:3b:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0021 address=0x0 flags=0x0000]",
            ("iommu_fault", "0000:3b:00.0", True),
        ),
        (
            "DMAR: [DMA Read NO_PASID] Request device [3b:00.0] fault addr 0x0 [fault reason 0x06]",
            ("iommu_fault", "0000:3b:00.0", True),
        ),
        ("DMAR: [INTR-REMAP] Request device [f0:1f.7] fault index 0x0", ("iommu_fault", "0000:f0:1f.7", False)),
        ("BUG: unable to handle page fault for address: ffffdead", ("kernel_oops", None, True)),
        ("BUG: kernel NULL pointer dereference, address: 0000000000000008", ("kernel_oops", None, True)),
        ("Oops: 0002 [#1] SMP NOPTI", ("kernel_oops", None, True)),
        ("Internal error: Oops: 0000000096000004 [#1] SMP", ("kernel_oops", None, True)),
        ("general protection fault, probably for non-canonical address 0xdead: 0000 [#1]", ("kernel_oops", None, True)),
        ("kernel BUG at mm/slub.c:4023!", ("kernel_oops", None, True)),
        ("Memory failure: 0x1234: recovery action for dirty LRU page: Recovered", ("memory_poison", None, False)),
        ("Memory failure: 0x1234: recovery action for dirty LRU page: Failed", ("memory_poison", None, None)),
        ("Memory failure: 0x12: Sending SIGBUS to python:77 due to hardware memory", ("memory_poison", None, None)),
        ("md/raid1:md0: Disk failure on sda1, disabling device.", ("raid_degraded", "md0", True)),
        ("md/raid:md127: raid level 5 active with 2 out of 3 devices", ("raid_degraded", "md127", False)),
        (
            "BTRFS error (device nvme0n1): bdev /dev/nvme0n1 errs: wr 0, rd 0, flush 0, corrupt 5, gen 0",
            ("filesystem_error", "nvme0n1", None),
        ),
        ("BTRFS warning (device sdb): csum failed root 5 ino 257 off 0", ("filesystem_error", "sdb", None)),
        (
            "BTRFS info (device sdb): bdev /dev/sdb errs: wr 0, rd 0, flush 0, corrupt 7, gen 0",
            ("filesystem_error", "sdb", False),
        ),
        ("EXT4-fs (dm-3): shut down requested (1)", ("filesystem_readonly", "dm-3", True)),
        ("EXT4-fs (sda1): error count since last fsck: 3", ("filesystem_error", "sda1", False)),
        ("XFS (dm-0): log I/O error -5", ("filesystem_error", "dm-0", None)),
        ("mlx5_core 0000:5e:00.0 ens1f0np0: TX timeout detected", ("nic_tx_timeout", "0000:5e:00.0", None)),
        (
            "mlx5_core 0000:5e:00.0: temp_warn:192: High temperature on sensors with bit set 0 1",
            ("nic_module", "0000:5e:00.0", None),
        ),
        (
            "efa 0000:00:1d.0: Failed to process command CREATE_QP (opcode 1) comp_status 7 err -12",
            ("nic_command_failed", "0000:00:1d.0", False),
        ),
        ("nfs: server fs1.site not responding, still trying", ("storage_lost", "fs1.site", None)),
        (
            "LustreError: 167-0: fsx-MDT0000-mdc-ffff88: This client was evicted by fsx-MDT0000; in progress",
            ("storage_lost", "fsx-MDT0000-mdc-ffff88", None),
        ),
        (
            "Lustre: fsx-OST0001-osc-ffff88: Connection to fsx-OST0001 (at 10.0.0.9@tcp) was lost; in progress",
            ("storage_lost", "fsx-OST0001-osc-ffff88", None),
        ),
        ("LustreError: 11-0: fsx-OST0001-osc: operation ost_read failed: rc = -107", ("storage_error", None, None)),
        ("blk_print_req_error: 31 callbacks suppressed", ("messages_suppressed", "blk_print_req_error", None)),
        (
            "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062) "
            "returned from status @ kernel_channel.c:2874",
            ("gpu_reset_required", None, True),
        ),
        (
            "NVRM: rpcRmApiAlloc_GSP: GspRmAlloc failed: hClient=0xc1d1a616; hParent=0x5c000054; hObject=0x5c00005b; "
            "hClass=0x0000c86f; paramsSize=0x00000170; paramsStatus=0x00000062; status=0x00000062",
            ("gpu_reset_required", None, True),
        ),
        (
            "NVRM: nvCheckOkFailedNoLog: Check failed: Generic ECC error [NV_ERR_ECC_ERROR] (0x0000000B) returned",
            ("gpu_reset_required", None, True),
        ),
        (
            "NVRM: nvCheckOkFailedNoLog: Check failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F)",
            ("gpu_lost", None, True),
        ),
        ("NVRM: rpcRmApiControl_GSP: GspRmControl failed: cmd=0x20803032; status=0x0000000f", ("gpu_lost", None, True)),
        (
            "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!",
            ("nvlink_undetected", None, True),
        ),
        (
            "NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!",
            ("nvlink_undetected", None, True),
        ),
        (
            "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing",
            ("peermem_error", None, None),
        ),
        (
            "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)",
            ("peermem_error", None, None),
        ),
        (
            "mlx5_core 0004:01:00.0: mlx5_pci_err_detected Device state = 1 health sensors: 1 pci_status: 1. Enter, "
            "pci channel state = 2",
            ("pcie_uncorrected", "0004:01:00.0", True),
        ),
        (
            "mlx5_core 0000:01:00.0: mlx5_pci_err_detected Device state = 1 health sensors: 0 pci_status: 1. Enter, "
            "pci channel state = 1",
            ("pcie_uncorrected", "0000:01:00.0", False),
        ),
        (
            "pt_main_thread[2536443]: segfault at 7f797fe00000 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 in "
            "libnccl.so.2[7f7c7ac00000+d3d3000]",
            ("nccl_crash", "pt_main_thread", None),
        ),
        (
            "traps: python3[77] general protection fault ip:7f0 sp:7f1 error:0 in libnccl.so.2.27.3[7f0+d3d]",
            ("nccl_crash", "python3", None),
        ),
        (
            "mlx5_core 0000:5e:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at "
            "0000:5d:01.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)",
            ("pcie_limited", "0000:5e:00.0", None),
        ),
        ("mce: Uncorrected hardware memory error in user-access at 8a398a400", ("machine_check", None, True)),
        ("mce: Kernel accessed poison in user space at 8a398a400", ("machine_check", None, True)),
        (
            "mlx5_core 0000:61:00.0: mlx5_function_enable:1479:(pid 1): Firmware over 120000 MS in pre-initializing "
            "state, aborting",
            ("nic_command_timeout", "0000:61:00.0", None),
        ),
        (
            "bnxt_en 0000:61:00.0 eth0: Firmware not responding, status: 0x8001",
            ("nic_command_timeout", "0000:61:00.0", None),
        ),
        ("md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.", ("raid_degraded", "md0", True)),
        ("md/linearmd127: Disk failure on sdb detected, failing array.", ("raid_degraded", "md127", True)),
        ("block nvme0n1: no usable path - requeuing I/O", ("disk_error", "nvme0n1", None)),
        ("block nvme0n1: no available path - failing I/O", ("disk_error", "nvme0n1", True)),
        ("kworker/u64:1: attempt to access beyond end of device", ("disk_error", None, None)),
        ("EXT4-fs (dm-0): I/O error while writing superblock", ("filesystem_error", "dm-0", None)),
        ("EXT4-fs (sdc8): previous I/O error to superblock detected", ("filesystem_error", "sdc8", None)),
        (
            "JBD2: I/O error when updating journal superblock for nvme0n1p1-8.",
            ("filesystem_error", "nvme0n1p1-8", None),
        ),
        (
            "BTRFS warning (device sdd): lost super block write due to IO error on /dev/sde (-5)",
            ("filesystem_error", "sdd", None),
        ),
        ('XFS (sda1): metadata I/O error in "xfs_buf_ioend+0x1/0x2" at daddr 0x1', ("filesystem_error", "sda1", None)),
        ("NFS: nfs4_reclaim_open_state: Lock reclaim failed!", ("storage_error", None, None)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stamp", ["3,1042,84621,-;", "[ 9123.456789] ", "Mar  3 12:00:01 node7 kernel: [ 9200.5] "])
def test_each_kind_is_found_with_its_device(
    line: str, expected: tuple[str, str | None, bool | None], stamp: str
) -> None:
    assert only(stamp + line) == expected


@pytest.mark.parametrize(
    ("limit", "capable"),
    [
        ("2.5 GT/s PCIe x1 link at 0000:00:02.0", "16.0 GT/s PCIe x16"),  # the port that a hypervisor shows its guest
        ("Unknown x0 link at 6b1a:00:02.0", "32.0 GT/s PCIe x16"),
        ("2.5 GT/s PCIe x16 link at 0000:12:00.0", "32.0 GT/s PCIe x16"),  # a GPU that sleeps
        ("16.0 GT/s PCIe x16 link at 0000:12:00.0", "32.0 GT/s PCIe x16"),  # a slot of the generation before
        ("8.0 GT/s PCIe x2 link at 0000:00:1d.0", "8.0 GT/s PCIe x4"),  # a disk
    ],
)
def test_a_link_that_is_limited_by_design_is_no_event(limit: str, capable: str) -> None:
    line = f"pci 0000:13:00.0: 2.000 Gb/s available PCIe bandwidth, limited by {limit} (capable of 9 Gb/s with "
    assert parse(f"[1.0] {line}{capable} link)\n").events == ()


def test_a_million_repeats_are_one_event_with_first_and_last() -> None:
    line = "[{}.5] mlx5_core 0000:5e:00.0: poll_health:825: Fatal error 3 detected\n"
    log = parse("".join(line.format(second) for second in range(1000)))
    (event,) = log.events
    assert (event.count, event.first, event.last, event.line) == (1000, "0.5", "999.5", 1000)


@pytest.mark.parametrize(
    ("lost", "restored"),
    [
        ("nfs: server fs1 not responding, still trying", "nfs: server fs1 OK"),
        (
            "Lustre: fsx-OST0001-osc-ffff88: Connection to fsx-OST0001 (at 10.0.0.9@tcp) was lost; in progress",
            "Lustre: fsx-OST0001-osc-ffff88: Connection restored to 10.0.0.9@tcp (at 10.0.0.9@tcp)",
        ),
    ],
)
def test_a_file_server_that_came_back_is_told_from_one_that_did_not(lost: str, restored: str) -> None:
    assert [event.recovered for event in parse(f"[1.0] {lost}\n[2.0] {restored}\n").events] == [True]
    assert [event.recovered for event in parse(f"[1.0] {lost}\n[2.0] {restored}\n[3.0] {lost}\n").events] == [False]
    other = restored.replace("fs1", "fs2").replace("OST0001", "OST0002")
    assert [event.recovered for event in parse(f"[1.0] {lost}\n[2.0] {other}\n").events] == [False]


@pytest.mark.parametrize(
    ("line", "boot"),
    [
        ("[    0.000000] Linux version 6.8.0-60-generic (x86_64)", True),
        ("[    0.000000] n1 kernel: Linux version 6.8.0", True),
        ("Nov 11 10:00:00 n1 kernel: [    0.000000] Linux version 6.8.0", True),
        ("2025-03-01T12:00:00.123456+00:00 n7 kernel: Linux version 6.8.0", True),
        ("[Tue Mar  4 12:00:00 2025] Linux version 5.14.0", True),
        ("5,0,0,-;Linux version 6.8.0", True),
        ("Linux version 6.8.0", True),
        ('[ 9000.1] audit: comm="uname" Linux version 6.8.0', False),
        ("[ 9000.1] Linux version 6.8.0", False),
        ("[    0.000000] systemd[1]: Running on Linux version 6.8.0", False),
        ("Nov 11 10:00:00 n1 agent[7]: Linux version 6.8.0", False),
    ],
)
def test_only_the_first_line_of_a_kernel_is_a_boot(line: str, boot: bool) -> None:
    assert kernel_line.is_boot(line) is boot
    assert parse(line).from_boot is boot


@pytest.mark.parametrize("line", ["NVRM: Xid: 2000 callbacks suppressed", "printk: 22 messages suppressed"])
def test_suppressed_messages_of_a_driver_are_lost_messages(line: str) -> None:
    assert parse(f"[1.0] {line}\n").lost == 1


def test_a_ring_buffer_that_lost_its_beginning_is_no_log_since_boot() -> None:
    log = parse("[ 9000.0] nvme nvme0: 32/0/0 default/read/poll queues\n** 412 printk messages dropped **\n")
    assert (log.from_boot, log.lost, log.lines) == (False, 1, 2)


def test_resets_have_their_lines_so_that_older_xids_can_be_told() -> None:
    text = (
        "[1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.133.20\n"
        "[2.0] NVRM: Xid (PCI:0000:3b:00): 94, Contained\n"
        f"[3.0] {ACTION} 0x0 (None) to 0x1 (GPU Reset Required)\n"
        "[4.0] nvidia 0000:3b:00.0: resetting\n"
        f"[5.0] {ACTION} 0x1 (GPU Reset Required) to 0x0 (None)\n"
        "[6.0] NVRM: Xid (PCI:0000:5e:00): 94, Contained\n"
    )
    log = parse(text)
    resets = {reset.device: reset.line for reset in log.resets}
    assert resets == {None: 1, "0000:3b:00": 5}
    lines = {(xid.device, xid.code, xid.recovery): xid.line for xid in log.xids}
    assert lines["0000:3b:00", 94, None] < resets["0000:3b:00"]
    assert lines["0000:5e:00", 94, None] == 6
    assert dict(log.recovery) == {"0000:3b:00": "None"}
