"""Faults put into a recorded node of eight H200s: each is found, on the GPU that has it, with one thing to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gpu_faults import CHECKS, FAULTS, SMI, Fault, kernel, make, xid

from machines import H200, Machine
from trainmaster import checks
from trainmaster.core.expect import Expect
from trainmaster.core.results import judge_overall


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hgx") / "node"
    shutil.copytree(H200, folder)
    make(Machine(folder))
    return folder


@pytest.fixture
def node(whole: Path, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "node", of=whole)


def test_there_are_enough_of_them() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25


@pytest.mark.matrix(one_in=3)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_and_named(node: Machine, fault: Fault) -> None:
    fault.put(node)
    results = checks.run(node.host, Expect(**fault.expect), level=2, only=CHECKS)
    findings = {result.check: result.findings for result in results}
    (found,) = [
        finding
        for finding in findings[fault.check]
        if (finding.device, str(finding.verdict)) == (fault.device, fault.verdict)
    ]
    assert found.reason
    assert found.action
    assert "\n" not in found.reason
    assert judge_overall(results, planned=CHECKS) == fault.overall
    if fault.device is not None and fault.check not in ("gpu_count", "dcgm") and fault.name != "nvlink hangs":
        others = {str(finding.verdict) for finding in findings[fault.check] if finding.device != fault.device}
        assert others <= {"pass", "skip", "warn"}  # warn: of the node, where its GPUs differ


def test_a_power_cap_at_the_full_limit_is_normal_operation(node: Machine) -> None:
    node.edit(None, {"clocks_event_reasons/clocks_event_reason_sw_power_cap": "Active",
                     "gpu_power_readings/instant_power_draw": "694.00 W"})  # fmt: skip
    assert set(node.verdicts("gpu_throttle").values()) == {"pass"}


def test_a_flood_of_one_error_is_one_finding(node: Machine) -> None:
    kernel("NVRM: Xid (PCI:0000:13:00): 95, pid=77, name=python, Uncontained ECC error", times=20_000)(node)
    (found,) = [finding for finding in node.judge("xid") if finding.device == "gpu3"]
    assert (found.verdict, found.values["count"]) == ("fail", 20_000)
    assert (found.values["first"], found.values["last"]) == ("1000.5", "20999.5")


def test_an_xid_of_an_earlier_boot_does_not_count(node: Machine) -> None:
    node.command("dmesg", "", exit_code=1)
    node.refuses(
        "journalctl -k -b --no-pager -o short-monotonic", "CommandMissing", "journalctl is not on this machine"
    )
    old = "Nov 10 10:00:00 n1 kernel: NVRM: Xid (PCI:0000:13:00): 79, GPU has fallen off the bus.\n"
    boot = "Nov 11 10:00:00 n1 kernel: [    0.000000] Linux version 6.8.0\n"
    node.file("/var/log/kern.log", old + boot + "Nov 11 10:00:01 n1 kernel: [    1.0] all is well\n")
    assert set(node.verdicts("xid").values()) == {"pass"}
    node.file("/var/log/kern.log", boot + old)
    assert node.verdicts("xid")["gpu3"] == "fail"


def test_a_log_that_lost_its_beginning_gives_way_to_the_journal(node: Machine) -> None:
    node.command("dmesg", "[99999.0] all is well\n")
    journal = "[    0.000000] n1 kernel: Linux version 6.8.0\n[ 50.0] n1 kernel: NVRM: Xid (PCI:0000:13:00): 79, lost\n"
    node.command("journalctl -k -b --no-pager -o short-monotonic", journal)
    assert node.verdicts("xid")["gpu3"] == "fail"


def test_the_log_still_speaks_where_nvidia_smi_hangs(node: Machine) -> None:
    xid(79)(node)
    node.refuses(SMI, "CommandTimedOut", "nvidia-smi gave no answer in 90 s and was killed")
    assert node.verdicts("xid")["gpu3"] == "fail"


def test_a_container_is_not_judged_by_the_gpus_of_others(node: Machine) -> None:
    make(node, 8, listed=1)
    node.answer("env", "NVIDIA_VISIBLE_DEVICES", "GPU-00000000-1111-2222-3333-000000000000")
    xid(79)(node)
    assert node.verdicts("xid") == {"gpu0": "pass"}


def test_a_site_lays_its_own_table_over_ours(node: Machine) -> None:
    xid(31)(node)
    row = '{ meaning = "ours", severity = "info", action = "nothing", source = "our site" }'
    node.file("/etc/trainmaster/xid.toml", f"[xid]\n31 = {row}\n")
    assert node.verdicts("xid")["gpu3"] == "pass"
    node.file("/etc/trainmaster/xid.toml", "[xid\n")
    assert node.verdicts("xid") == {None: "error"}
    node.file("/etc/trainmaster/xid.toml", None)
    assert node.verdicts("xid", xids=("31:deadly",)) == {None: "error"}


def test_a_fabric_manager_that_is_down_fails_gpus_that_tell_no_state(node: Machine) -> None:
    node.edit(None, {"fabric/state": "N/A", "product_name": "NVIDIA A100-SXM4-80GB"})
    switch = "/sys/bus/pci/devices/0000:c1:00.0"
    node.answer("list", "/sys/bus/pci/devices", [*(f"0000:{16 + n:02x}:00.0" for n in range(8)), "0000:c1:00.0"])
    node.file(f"{switch}/vendor", "0x10de\n")
    node.file(f"{switch}/class", "0x068000\n")
    for said, verdict in (("active", "pass"), ("inactive", "fail"), ("failed", "fail"), ("", "error")):
        node.command("systemctl is-active nvidia-fabricmanager", f"{said}\n", exit_code=0 if said == "active" else 3)
        assert set(node.verdicts("gpu_fabric").values()) == {verdict}
