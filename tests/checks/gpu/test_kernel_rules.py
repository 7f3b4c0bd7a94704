"""Severity of kernel messages without a code: by what they tell, how many there are, and whether they ended."""

from __future__ import annotations

from typing import get_args

import pytest
from gpu_faults import kernel, make
from nodes import plain_vm

from machines import Machine
from trainmaster.checks.gpu import _kernel_rules
from trainmaster.node.parse.kernel_events import Kind

CORRECTED = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: 8c00004000010090"
UNCORRECTED = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: bd80000000100134"
JOURNAL = "journalctl -k -b --no-pager -o short-monotonic"
READ_ONLY = "EXT4-fs (sda1): Remounting filesystem read-only"


def worst(machine: Machine, **expect: object) -> str:
    order = ["skip", "pass", "warn", "error", "fail"]
    return max(machine.verdicts("xid", **expect).values(), key=order.index)


def test_every_kind_has_a_rule() -> None:
    assert set(_kernel_rules.EVENTS) == set(get_args(Kind))


@pytest.mark.parametrize(
    ("line", "times", "verdict"),
    [
        (CORRECTED, 1, "warn"),
        (CORRECTED, 999, "warn"),
        (CORRECTED, 1000, "fail"),
        (UNCORRECTED, 1, "fail"),
        ("pcieport 0000:3a:01.0: AER: Corrected error received: 0000:5e:00.0", 999, "pass"),
        ("pcieport 0000:3a:01.0: AER: Corrected error received: 0000:5e:00.0", 1000, "warn"),
        ("mlx5_core 0000:5e:00.0 ens1: TX timeout detected", 29, "warn"),
        ("mlx5_core 0000:5e:00.0 ens1: TX timeout detected", 30, "fail"),
        ("nvme nvme0: I/O 12 QID 3 timeout, aborting", 1, "warn"),
        ("nvme nvme0: Disabling device after reset failure: -19", 1, "fail"),
        ("blk_print_req_error: 31 callbacks suppressed", 1, "warn"),
        ("kauditd_printk_skb: 24 callbacks suppressed", 1, "pass"),
        ("DMAR: [INTR-REMAP] Request device [f0:1f.7] fault index 0x0", 1, "warn"),
        ("Memory failure: 0x1234: recovery action for dirty LRU page: Recovered", 1, "warn"),
    ],
)
def test_severity(machine: Machine, line: str, times: int, verdict: str) -> None:
    make(machine)
    kernel(line, times=times)(machine)
    assert worst(machine) == verdict


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("NVRM: A GPU crash dump has been created.", "pass"),
        ("NVRM: GPU 0000:13:00.0: RmInitAdapter failed! (0x24:0x72:1568)", "pass"),
        ("nvidia 0000:13:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer", "pass"),
        ("nvidia 0000:14:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer", "fail"),
        ("mlx5_core 0000:5e:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link Layer", "fail"),
    ],
)
def test_the_reset_of_a_gpu_ends_only_its_own_faults(machine: Machine, line: str, verdict: str) -> None:
    make(machine)
    kernel(line)(machine)
    kernel("nvidia 0000:13:00.0: resetting")(machine)
    assert worst(machine) == verdict


def test_a_machine_without_a_gpu_is_judged_by_its_log(machine: Machine) -> None:
    plain_vm(machine)
    assert [str(finding.verdict) for finding in machine.judge("xid")] == ["pass"]  # and no skip beside it
    kernel(READ_ONLY)(machine)
    assert machine.verdicts("xid") == {"sda1": "fail"}
    kernel("NVRM: Xid (PCI:0000:13:00): 79, GPU has fallen off the bus.")(machine)
    assert machine.verdicts("xid")["0000:13:00"] == "fail"
    assert "0000:13:00" not in machine.verdicts("xid", gpus=0)


def test_what_a_program_wrote_to_kmsg_accuses_no_gpu(machine: Machine) -> None:
    """The same text twice: `dmesg -k` leaves out what has another facility; without -k its sender tells."""
    make(machine)
    quiet = machine.host.run("dmesg").stdout
    kernel("NVRM: Xid (PCI:0000:13:00): 79, GPU has fallen off the bus.")(machine)
    assert worst(machine) == "fail"
    machine.command("dmesg -k", quiet)
    assert worst(machine) == "pass"
    machine.command("dmesg -k", "", exit_code=1, stderr="dmesg: invalid option -- 'k'\n")  # busybox
    assert worst(machine) == "fail"
    machine.replace("dmesg", "NVRM: Xid", "agent[77]: NVRM: Xid")
    assert worst(machine) == "pass"


def test_without_a_gpu_a_closed_log_is_a_skip_and_a_damaged_one_an_error(machine: Machine) -> None:
    plain_vm(machine)
    kernel(READ_ONLY)(machine)
    whole = machine.host.run("dmesg").stdout
    machine.refuses(JOURNAL, "CommandMissing", "journalctl is not on this machine")
    for path in ("/var/log/kern.log", "/var/log/messages"):
        machine.file(path, None)
    machine.command("dmesg", "", exit_code=1, stderr="dmesg: read kernel buffer failed: Operation not permitted\n")
    (skipped,) = machine.judge("xid")
    assert skipped.verdict == "skip"
    assert "Operation not permitted" in (skipped.proof or "")
    for damaged in ("", "\n", whole[:-20]):
        machine.command("dmesg", damaged)
        assert worst(machine) == "error"


def test_every_new_kind_has_its_verdict_and_an_action(machine: Machine) -> None:
    """Texts that were not read, or stood behind words that dropped them: verdict and a word of the action."""
    lines = {
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062) returned "
        "from status @ kernel_channel.c:2874": ("fail", "reset"),
        "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!": ("fail", "reboot"),
        "md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.": ("fail", "replace the disk"),
        "block nvme0n1: no available path - failing I/O": ("fail", "disk"),
        "EXT4-fs (dm-0): I/O error while writing superblock": ("fail", "disk"),
        "mce: Uncorrected hardware memory error in user-access at 8a398a400": ("fail", "replaced"),
        "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context": ("warn", "update"),
        "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)": ("warn", "update"),
        "mlx5_core 0000:61:00.0: mlx5_pci_err_detected Device state = 1 health sensors: 1 pci_status: 1. Enter, pci "
        "channel state = 2": ("fail", "reseat"),
        "pt_main_thread[7]: segfault at 7f7 ip 00007f sp 00007f error 4 in libnccl.so.2[7f7+d3]": ("warn", "NCCL"),
        "mlx5_core 0000:61:00.0: Firmware over 120000 MS in pre-initializing state, aborting": ("fail", "adapter"),
        "mlx5_core 0000:61:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at "
        "0000:60:01.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)": ("warn", "reseat"),
    }
    make(machine)
    quiet = machine.host.run("dmesg").stdout
    for line, (verdict, action) in lines.items():
        machine.command("dmesg", quiet)
        kernel(line)(machine)
        (finding,) = [finding for finding in machine.judge("xid") if finding.verdict != "pass"]
        assert finding.verdict == verdict, line
        assert action in (finding.action or ""), line


STARTED = "[Jul 23 2024 07:00:00] [INFO] [tid 841] Fabric Manager version 570.133.20 is running with the following"
FATAL = (
    "[Jul 23 2024 07:53:55] [ERROR] [tid 841] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id "
    "00000000:86:00.0 physical id 3 port 33"
)
MILD = FATAL.replace("fatal error 20034", "non-fatal error 12028")
TEAM = "[Sep 17 2024 06:01:46] [ERROR] [tid 1230079] failed to find the GPU handle 5410 in the multicast team request"
GONE = TEAM.partition("failed")[0] + "detected number of NVSwitches don't match with any supported system topology"
ROUTINE = "[Feb 25 2025 13:59:45] [INFO] [tid 1808] multicast group 0 is freed.\nMessage payload details:Team release"
LINK = "[Oct 13 2025 18:14:38] [ERROR] [tid 202] Fabric Manager detected GPU NVL Fatal error on :\nmoduleId : 3"
NOTHING = "[Feb 25 2025 13:59:45] [ERROR] [tid 1] failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]"


@pytest.mark.parametrize(
    ("log", "device", "verdict"),
    [
        ((STARTED, ROUTINE), None, None),
        ((STARTED, FATAL), "nvswitch 0000:86:00", "fail"),
        ((FATAL,), "nvswitch 0000:86:00", "fail"),  # the log was turned over since the start
        ((FATAL, STARTED, ROUTINE), None, None),
        ((STARTED, MILD), "nvswitch 0000:86:00", "warn"),
        ((STARTED, TEAM, TEAM.replace("5410", "6130")), None, "warn"),
        ((STARTED, GONE), None, "fail"),
        ((NOTHING,), None, None),
        ((STARTED, LINK), None, "fail"),
    ],
)
def test_the_log_of_fabric_manager_is_read(
    machine: Machine, log: tuple[str, ...], device: str | None, verdict: str | None
) -> None:
    make(machine)
    machine.file("/var/log/fabricmanager.log", "\n".join(log) + "\n")
    bad = [finding for finding in machine.judge("gpu_fabric") if finding.verdict != "pass"]
    assert [(finding.device, str(finding.verdict)) for finding in bad] == ([(device, verdict)] if verdict else [])
