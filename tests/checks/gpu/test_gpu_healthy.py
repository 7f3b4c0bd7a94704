"""Healthy nodes of many kinds, in every schema of nvidia-smi: no false alarm, and every GPU is spoken of."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from gpu_nodes import H100, H200, NODES, Node, found, shape

from machines import Machine
from trainmaster import checks
from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.gpus import gpus
from trainmaster.core.results import judge_overall

CHECKS = [name for name in checks.names() if name.startswith("gpu_")] + ["xid", "dcgm", "dcgm_stress"]


def test_there_are_twenty_kinds() -> None:
    assert len(NODES) >= 20


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", NODES)
def test_a_healthy_node_raises_no_alarm(machine: Machine, name: str) -> None:
    shape(machine, NODES[name])
    results = checks.run(machine.host, Expect(gpus=NODES[name].gpus), level=3, only=CHECKS)
    wrong = [(result.check, f) for result in results for f in result.findings if f.verdict not in ("pass", "skip")]
    assert wrong == []
    assert judge_overall(results, planned=CHECKS) == "PASS"
    devices = {f"gpu{n}" for n in range(NODES[name].gpus)}
    for result in results:
        if result.check not in ("gpu_driver", "dcgm", "dcgm_stress"):
            assert devices <= {finding.device for finding in result.findings}, result.check


@pytest.mark.parametrize("name", ["8 H200", "8 A100 40 GB", "8 V100"])
def test_the_same_node_with_one_fault_is_not_healthy(machine: Machine, name: str) -> None:
    """The older schemas are read, not skipped over."""
    shape(machine, NODES[name])
    slow = "clocks_throttle_reason_hw_slowdown" if NODES[name].schema == "v11" else "clocks_event_reason_hw_slowdown"
    machine.edit(2, {f"{slow.partition('_reason_')[0]}_reasons/{slow}": "Active"})
    assert machine.verdicts("gpu_throttle")["gpu2"] == "fail"
    machine.edit(2, {"ecc_errors/volatile/dram_uncorrectable": "1"})
    assert machine.verdicts("gpu_ecc")["gpu2"] == "fail"
    power = "power_readings/power_limit" if NODES[name].schema == "v11" else "gpu_power_readings/current_power_limit"
    machine.edit(2, {power: "100.00 W"})
    assert machine.verdicts("gpu_power")["gpu2"] == "warn"
    machine.replace("nvidia-smi nvlink -s", "Link 3: 26.562 GB/s", "Link 3: <inactive>")
    assert machine.verdicts("gpu_nvlink")["gpu0"] == "fail"


def test_a_container_with_one_of_eight_gpus(machine: Machine) -> None:
    shape(machine, H100)
    text = machine.host.run("nvidia-smi", "-q", "-x").stdout
    root = ET.fromstring(text)
    for gpu in root.findall("gpu")[1:]:
        root.remove(gpu)
    found(root, "attached_gpus").text = "1"
    machine.smi(ET.tostring(root, encoding="unicode"))
    machine.answer("env", "NVIDIA_VISIBLE_DEVICES", "GPU-00000000-1111-2222-3333-000000000000")
    results = checks.run(machine.host, Expect(), level=3, only=CHECKS)
    assert [f for result in results for f in result.findings if f.verdict not in ("pass", "skip")] == []


def test_what_is_stated_is_met(machine: Machine) -> None:
    shape(machine, H200)
    stated = Expect(gpus=8, gpu_model="H200", gpu_memory_gib=126.9, driver="580", pcie_gen=5, pcie_width=16, nvlinks=18,
                    fabric=True, ecc=True, mig=False, persistence=True, gpu_power_w=700, gpu_clock_mhz=1980,
                    vbios="96.00.A5.00.1A")  # fmt: skip
    results = checks.run(machine.host, stated, level=3, only=CHECKS)
    assert [f for result in results for f in result.findings if f.verdict not in ("pass", "skip")] == []


def of_table(name: str) -> Node:
    """A healthy node of a model of the table, with what its facts say."""
    model = gpus()[name]
    pages = model.generation in nvidia.RETIRES_PAGES
    gen = model.pcie_gen or 5
    return Node(
        model=f"NVIDIA {model.names[0]}", gpus=1 if name.startswith("GH200") else 4, schema="v13", driver="580.95.05",
        cuda="13.0", memory_mib=int(model.memory_gb * 1e9 / (1 << 20) * 0.98), power_w=int(model.power_w or 400),
        gen=f"{gen}/{gen}", width=f"{model.pcie_width or 16}x/16x", links=model.nvlinks or 0, fabric=bool(model.fabric),
        remap=not pages, retire=pages, mig=(model.memory_kind or "").startswith("HBM") and not pages,
    )  # fmt: skip


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", gpus())
def test_a_healthy_node_of_every_model_in_the_table_raises_no_alarm(machine: Machine, name: str) -> None:
    shape(machine, of_table(name))
    results = checks.run(machine.host, Expect(), level=1, only=[check for check in CHECKS if "dcgm" not in check])
    wrong = [(result.check, f) for result in results for f in result.findings if f.verdict not in ("pass", "skip")]
    assert wrong == []


@pytest.mark.parametrize(
    ("gpu", "word", "failing"),
    [(2, "Disabled", {"gpu2"}), (None, "Disabled", {f"gpu{n}" for n in range(4)})],
)
def test_c2c_that_is_off_fails_on_a_superchip(machine: Machine, gpu: int | None, word: str, failing: set[str]) -> None:
    shape(machine, NODES["4 GB200"])
    machine.edit(gpu, {"c2c_mode": word})
    found = machine.verdicts("gpu_pcie")
    assert {str(device) for device, verdict in found.items() if verdict == "fail"} == failing


@pytest.mark.parametrize("word", ["Active", "N/A", "ERR!", None])
def test_c2c_that_a_superchip_does_not_report_is_an_error(machine: Machine, word: str | None) -> None:
    shape(machine, NODES["4 GB200"])
    machine.edit(None, {"c2c_mode": word})
    assert set(machine.verdicts("gpu_pcie").values()) == {"error"}
    machine.replace("nvidia-smi -q -x", NODES["4 GB200"].driver, "535.183.01")  # which reports it of no GPU
    assert (machine.verdicts("gpu_pcie")["gpu1"] == "error") is (word in ("Active", "ERR!"))


def test_boards_that_save_power_are_not_compared(machine: Machine) -> None:
    shape(machine, NODES["8 L40S"])
    machine.edit(None, {"pci/pci_gpu_link_info/pcie_gen/current_link_gen": "4"})
    machine.edit(3, {"pci/pci_gpu_link_info/pcie_gen/current_link_gen": "1"})
    assert set(machine.verdicts("gpu_pcie").values()) == {"pass"}
