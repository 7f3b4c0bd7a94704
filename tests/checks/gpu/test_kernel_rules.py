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
    assert machine.verdicts("xid") == {None: "pass"}  # and a skip, for the GPUs
    kernel(READ_ONLY)(machine)
    assert machine.verdicts("xid") == {None: "skip", "sda1": "fail"}
    kernel("NVRM: Xid (PCI:0000:13:00): 79, GPU has fallen off the bus.")(machine)
    assert machine.verdicts("xid")["0000:13:00"] == "fail"
    assert "0000:13:00" not in machine.verdicts("xid", gpus=0)


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
