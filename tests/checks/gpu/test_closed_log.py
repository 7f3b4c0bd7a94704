"""A kernel log that rights keep from this process: what is seen without it, what is not, and who may ask for more."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_gpu_healthy import H100, shape

from machines import Machine
from trainmaster.checks import __main__ as program
from trainmaster.checks import nvidia
from trainmaster.checks.gpu import _closed_log, _kernel_rules
from trainmaster.core.health import NodeHealth
from trainmaster.core.results import UNSEEN, CheckResult, Finding, Overall, Verdict, judge_overall

JOURNAL = "journalctl -k -b --no-pager -o short-monotonic"
REFUSED = "dmesg: read kernel buffer failed: Operation not permitted\n"
POD = "CapInh:\t0000000000000000\nCapBnd:\t00000000a80425fb\n"  # the rights of a default container
ROOT = "CapInh:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"
GPU3 = "0000:13:00.0"


def close(machine: Machine, *, status: str = POD) -> None:
    """The log of a default container: dmesg is refused, journalctl finds no journal, and there is no file."""
    machine.command("dmesg", "", exit_code=1, stderr=REFUSED)
    machine.command(JOURNAL, "-- No entries --\n", stderr="No journal files were found.\n")
    for path in ("/var/log/kern.log", "/var/log/messages"):
        machine.file(path, None)
    machine.file("/proc/self/status", status)
    machine.file("/proc/sys/kernel/tainted", "12289\n")  # proprietary, out of tree, unsigned: the NVIDIA driver's
    machine.file("/proc/meminfo", machine.host.read("/proc/meminfo") + "HardwareCorrupted:     0 kB\n")
    machine.answer("list", _closed_log.EDAC, ["mc", "mc0", "mc1"])
    for name in ("mc0", "mc1"):
        machine.file(f"{_closed_log.EDAC}/{name}/ue_count", "0\n")
    for bus in nvidia.read(machine.host).bus:
        count_errors(machine, bus)


def count_errors(machine: Machine, bus: str, *, fatal: int = 0, lesser: int = 0) -> None:
    for kind, count in (("fatal", fatal), ("nonfatal", lesser)):
        text = f"Undefined 0\nDLP {count}\nTOTAL_ERR_{kind.upper()} {count}\n"
        machine.file(f"{nvidia.PCI}/{bus}/aer_dev_{kind}", text)


@pytest.fixture
def pod(machine: Machine) -> Machine:
    """A container with eight healthy H100 and the rights of a default pod."""
    shape(machine, replace(H100, schema="v13", driver="580.95.05", cuda="13.0"))
    close(machine)
    return machine


def test_a_closed_log_warns_and_names_what_is_not_seen(pod: Machine) -> None:
    (found,) = pod.judge("xid", gpus=8)
    hidden = found.values[UNSEEN]
    assert (found.verdict, found.device) == ("warn", None)
    assert all(words in found.reason for words in ("Operation not permitted", "13, 31, 43, 45", "SXids", *hidden))
    for kind in ("nic health", "disk error", "iommu fault", "raid degraded"):
        assert kind in hidden
    for kind in ("kernel oops", "memory poison", "pcie uncorrected", "gpu lost", "gpu crashed"):
        assert kind not in hidden
    assert "CAP_SYSLOG" in (found.action or "") and "preflight.require" in (found.action or "")


def test_each_kind_of_message_is_seen_by_something_that_exists_or_is_named_as_unseen(pod: Machine) -> None:
    from trainmaster.checks import names

    files = {_closed_log.TAINTED, _closed_log.MEMINFO, _closed_log.EDAC, "aer_dev_fatal"}
    assert set(_closed_log.SEEN_BY.values()) <= files | set(names())
    nothing = _closed_log.Instead(barred=True, tainted=None, corrupted_kb=None)
    hidden = set(_closed_log.unseen(nothing, nvidia.read(pod.host)))
    read_here = [kind for kind, place in _closed_log.SEEN_BY.items() if place in files]
    missing = {kind for kind in _kernel_rules.EVENTS if kind not in _closed_log.SEEN_BY} | set(read_here)
    assert {kind.replace("_", " ") for kind in missing} <= hidden


def test_without_a_recovery_action_xids_that_need_a_reset_are_unseen_too(pod: Machine) -> None:
    assert not any("119" in words for words in pod.judge("xid")[-1].values[UNSEEN])
    pod.edit(None, {"gpu_recovery_action": None})
    assert any("119" in words for words in pod.judge("xid")[-1].values[UNSEEN])


@pytest.mark.parametrize(
    ("path", "text", "verdict", "words"),
    [
        ("/proc/sys/kernel/tainted", "12417\n", "fail", "kernel oops"),
        ("/proc/sys/kernel/tainted", "28673\n", "fail", "stuck in the kernel"),
        ("/proc/sys/kernel/tainted", "12305\n", "warn", "machine check"),
        ("/sys/devices/system/edac/mc/mc1/ue_count", "2\n", "fail", "mc1 counts 2"),
        ("/proc/meminfo", "HardwareCorrupted:     4 kB\n", "fail", "HardwareCorrupted is 4 kB"),
    ],
)
def test_a_fault_that_the_kernel_counts_is_named(pod: Machine, path: str, text: str, verdict: str, words: str) -> None:
    pod.file(path, text)
    fault, closed = pod.judge("xid")
    assert (fault.verdict, closed.verdict) == (verdict, "warn")
    assert words in fault.reason and UNSEEN not in fault.values


@pytest.mark.parametrize(("fatal", "lesser", "verdict"), [(1, 0, "fail"), (0, 3, "warn")])
def test_pcie_errors_of_a_gpu_are_named_with_it(pod: Machine, fatal: int, lesser: int, verdict: str) -> None:
    count_errors(pod, GPU3, fatal=fatal, lesser=lesser)
    assert pod.verdicts("xid") == {"gpu3": verdict, None: "warn"}


def test_what_is_not_shown_or_not_a_number_is_unseen(pod: Machine) -> None:
    pod.file("/proc/sys/kernel/tainted", "many\n")
    pod.file(f"{nvidia.PCI}/{GPU3}/aer_dev_fatal", None)
    pod.file(f"{_closed_log.EDAC}/mc0/ue_count", "\n")
    (found,) = pod.judge("xid")
    assert {"kernel oops", "pcie uncorrected", "memory uncorrected"} <= set(found.values[UNSEEN])


@pytest.mark.parametrize(
    ("status", "stderr", "verdict"),
    [
        (POD, REFUSED, "warn"),
        (ROOT, REFUSED, "warn"),  # a user of the node without the right
        (POD, "", "warn"),  # an image without dmesg, in a container that would be refused
        (ROOT, "", "error"),  # nothing forbids it: dmesg can be installed
    ],
)
def test_only_rights_make_it_a_warning(pod: Machine, status: str, stderr: str, verdict: str) -> None:
    pod.file("/proc/self/status", status)
    if not stderr:
        pod.refuses("dmesg", "CommandMissing", "dmesg is not on this machine")
    assert pod.verdicts("xid") == {None: verdict}


def test_a_damaged_or_empty_log_and_a_hung_driver_stay_errors(pod: Machine) -> None:
    pod.command("dmesg", "\n")
    assert pod.verdicts("xid") == {None: "error"}
    pod.command("dmesg", "", exit_code=1, stderr=REFUSED)
    pod.refuses("nvidia-smi -q -x", "CommandTimedOut", "nvidia-smi gave no answer in 90 s and was killed")
    assert pod.verdicts("xid") == {None: "error"}


def test_an_empty_journal_is_no_damage_on_a_machine_without_a_gpu(machine: Machine) -> None:
    machine.no_gpus()
    close(machine)
    assert machine.verdicts("xid") == {None: "skip"}


def test_strict_and_require_make_it_incomplete(pod: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        code = program.main(["--replay", str(pod.folder), "--only", "xid", "--json", *words])
        return code, str(json.loads(capsys.readouterr().out)["overall"])

    assert run() == (0, "WARN")
    assert run("--strict") == (3, "INCOMPLETE")
    assert run("--require", "xid") == (3, "INCOMPLETE")
    assert run("--require", "gpu_ecc") == (0, "WARN")
    assert program.main(["--replay", str(pod.folder), "--require", "xit"]) == 2


def test_a_plain_warning_is_not_made_an_error() -> None:
    plain = CheckResult(check="shm", findings=(Finding(verdict=Verdict.WARN, reason="small"),), took_s=0.0)
    health = NodeHealth(node="a", level=1, planned=("shm",), results=(plain,))
    assert health.demanding() == health
    assert judge_overall(health.demanding().results, planned=["shm"]) is Overall.WARN
