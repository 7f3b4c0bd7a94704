"""Faults of GPUs: each is named, on the GPU that has it, and none is silent."""

from __future__ import annotations

import json

import pytest

from machines import H200, Machine
from trainmaster.checks import names
from trainmaster.node.recorded import RecordedHost

GPU_CHECKS = [name for name in names() if name.startswith("gpu_")]
# An H200 remaps rows instead of retiring pages, and the recorded one stands behind no NVSwitch.
DOES_NOT_APPLY = {"gpu_retired", "gpu_fabric"}
REAL = (H200 / "commands" / "nvidia-smi_-q_-x.out").read_text()


@pytest.mark.slow
def test_eight_of_eight_pass(machine: Machine) -> None:
    machine.gpus(8)
    expect = {"gpus": 8, "gpu_model": "h200", "driver": "580", "gpu_memory_gib": 140.0}
    devices = {f"gpu{n}" for n in range(8)}
    for check in GPU_CHECKS:
        verdicts = machine.verdicts(check, **expect)
        assert set(verdicts.values()) == ({"skip"} if check in DOES_NOT_APPLY else {"pass"}), check
        assert check == "gpu_driver" or devices <= set(verdicts)


@pytest.mark.parametrize("stated", [None, 8])
def test_seven_of_eight_is_a_failure_of_the_missing_one(machine: Machine, stated: int | None) -> None:
    machine.gpus(8, drop=3)
    verdicts = machine.verdicts("gpu_count", gpus=stated)
    assert verdicts.pop(None) == "fail"
    assert verdicts.pop("gpu3") == "fail"
    assert set(verdicts.values()) == {"pass"}
    for check in set(GPU_CHECKS) - {"gpu_count", "gpu_driver"}:
        verdicts = machine.verdicts(check, gpus=stated)
        verdicts.pop(None, None)
        assert verdicts.pop("gpu3") == "error"
        assert list(verdicts.values()) == ["skip" if check in DOES_NOT_APPLY else "pass"] * 7, check


def test_a_gpu_that_is_counted_but_not_listed(machine: Machine) -> None:
    machine.smi(REAL.replace("<attached_gpus>1<", "<attached_gpus>2<"))
    assert machine.verdicts("gpu_count") == {None: "fail", "gpu0": "pass", "gpu1": "fail"}
    assert machine.verdicts("gpu_memory") == {"gpu0": "pass", "gpu1": "error"}
    assert machine.verdicts("gpu_count", gpus=1) == {None: "fail", "gpu0": "pass"}  # the driver lost one all the same


def test_more_than_stated_is_the_wrong_machine(machine: Machine) -> None:
    machine.gpus(8)
    assert machine.verdicts("gpu_count", gpus=4)[None] == "fail"


def test_device_files_without_a_gpu_behind_them_count(machine: Machine) -> None:
    """A GPU that fell off the bus leaves its /dev/nvidia3 behind."""
    machine.gpus(7)
    machine.answer("list", "/dev", [f"nvidia{n}" for n in range(8)])
    assert machine.verdicts("gpu_count") == {None: "fail", **{f"gpu{n}": "pass" for n in range(7)}, "gpu7": "fail"}


@pytest.mark.parametrize("check", GPU_CHECKS)
def test_a_machine_without_gpus_skips_unless_they_are_expected(machine: Machine, check: str) -> None:
    machine.no_gpus()
    assert machine.verdicts(check) == {None: "skip"}
    assert machine.verdicts(check, gpus=0) == {None: "skip"}
    (finding,) = machine.judge(check, gpus=8)
    assert finding.verdict == "fail"
    assert finding.reason == "0 of 8 GPUs: nvidia-smi is not installed and the PCI bus shows no NVIDIA device"


def test_a_machine_without_a_pci_bus_has_no_gpu(machine: Machine) -> None:
    machine.no_gpus()
    machine.answer("list", "/sys/bus/pci/devices", {"error": "FileMissing", "message": "not there"})
    assert machine.verdicts("gpu_count") == {None: "skip"}


@pytest.mark.parametrize("check", GPU_CHECKS)
@pytest.mark.parametrize("trouble", ["missing", "hung", "failed", "rubbish", "empty", "half"])
def test_gpus_that_nobody_can_be_asked_about_are_an_error(machine: Machine, check: str, trouble: str) -> None:
    line = "nvidia-smi -q -x"
    {
        "missing": lambda: machine.refuses(line, "CommandMissing", "nvidia-smi is not on this machine"),
        "hung": lambda: machine.refuses(line, "CommandTimedOut", "nvidia-smi gave no answer in 90 s and was killed"),
        "failed": lambda: machine.command(line, "NVIDIA-SMI has failed\n", exit_code=9),
        "rubbish": lambda: machine.smi("Segmentation fault"),
        "empty": lambda: machine.smi(""),
        "half": lambda: machine.smi(REAL[: len(REAL) // 2]),
    }[trouble]()
    (finding,) = machine.judge(check)
    assert finding.verdict == "error"
    assert finding.action
    (finding,) = machine.judge(check, gpus=1)
    assert finding.verdict == "error"


def test_a_bus_that_cannot_be_read_is_never_an_empty_bus(machine: Machine) -> None:
    machine.answer("list", "/sys/bus/pci/devices", {"error": "FileUnreadable", "message": "Permission denied"})
    with pytest.raises(Exception, match="Permission denied"):
        machine.judge("gpu_count")


def test_an_nvidia_smi_that_was_not_captured_is_not_a_missing_one(machine: Machine) -> None:
    machine.no_gpus()
    machine.put_answers(json.loads(json.dumps(machine.answers).replace("nvidia-smi -q", "x")))
    with pytest.raises(Exception, match="does not hold"):
        machine.judge("gpu_count")
    assert isinstance(machine.host, RecordedHost)


def test_the_wrong_model(machine: Machine) -> None:
    assert machine.verdicts("gpu_model", gpu_model="H100") == {"gpu0": "fail"}
    assert machine.verdicts("gpu_model", gpu_model="H200") == {"gpu0": "pass"}
    machine.smi(REAL.replace("<product_name>NVIDIA H200<", "<product_name>NVIDIA GH200 480GB<"))
    assert machine.verdicts("gpu_model", gpu_model="H200") == {"gpu0": "fail"}  # part of the name, and another chip
    machine.smi(REAL.replace("<product_name>NVIDIA H200<", "<product_name>ERR!<"))
    assert machine.verdicts("gpu_model") == {"gpu0": "error"}


@pytest.mark.parametrize(
    ("stated", "verdict"),
    [
        ("580", "pass"),
        ("580.159.04", "pass"),
        ("580.159", "pass"),
        ("58", "fail"),
        ("570", "fail"),
        ("580.159.04.1", "fail"),
    ],
)
def test_the_driver(machine: Machine, stated: str, verdict: str) -> None:
    assert machine.verdicts("gpu_driver", driver=stated) == {None: verdict}


def test_a_driver_without_a_version_is_an_error(machine: Machine) -> None:
    machine.smi(REAL.replace("<driver_version>580.159.04<", "<driver_version>N/A<"))
    assert machine.verdicts("gpu_driver") == {None: "error"}


@pytest.mark.parametrize(
    ("old", "new", "expect", "verdict"),
    [
        ("", "", {"gpu_memory_gib": 140.0}, "pass"),
        ("", "", {"gpu_memory_gib": 141.0}, "fail"),
        ("<total>143771 MiB", "<total>N/A", {}, "error"),
        ("<total>143771 MiB", "<total>0 MiB", {}, "error"),
        ("<used>0 MiB", "<used>ERR!", {}, "error"),
        ("<used>0 MiB", "<used>2000 MiB", {}, "pass"),
        ("<used>0 MiB", "<used>9000 MiB", {}, "warn"),
    ],
)
def test_memory(machine: Machine, old: str, new: str, expect: dict[str, float], verdict: str) -> None:
    machine.smi(REAL.replace(old, new, 1) if old else REAL)
    assert machine.verdicts("gpu_memory", **expect) == {"gpu0": verdict}


@pytest.mark.parametrize(
    ("now", "headroom", "limit", "verdict"),
    [
        ("38 C", "49 C", None, "pass"),
        ("76 C", "11 C", None, "warn"),
        ("88 C", "1 C", None, "fail"),
        ("60 C", "0 C", None, "fail"),
        ("60 C", "N/A", None, "error"),
        ("60 C", "49 C", 50.0, "fail"),
        ("76 C", "11 C", 80.0, "pass"),
        ("N/A", "N/A", None, "error"),
        ("0 C", "49 C", None, "error"),
        ("65535 C", "N/A", None, "error"),
        ("ERR!", "49 C", 90.0, "error"),
    ],
)
def test_temperature(machine: Machine, now: str, headroom: str, limit: float | None, verdict: str) -> None:
    text = REAL.replace("<gpu_temp>38 C", f"<gpu_temp>{now}").replace(
        "<gpu_temp_tlimit>49 C", f"<gpu_temp_tlimit>{headroom}"
    )
    machine.smi(text)
    assert machine.verdicts("gpu_temperature", gpu_temperature_c=limit) == {"gpu0": verdict}
