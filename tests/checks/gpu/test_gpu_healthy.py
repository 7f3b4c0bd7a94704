"""Healthy nodes of many kinds, in every schema of nvidia-smi: no false alarm, and every GPU is spoken of."""

from __future__ import annotations

import shlex
import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace

import pytest

from machines import Machine, edit_smi, smi_text
from trainmaster import checks
from trainmaster.checks import nvidia
from trainmaster.checks.gpu import gpu_compat
from trainmaster.core.expect import Expect
from trainmaster.core.gpus import gpus, of_gpu
from trainmaster.core.results import judge_overall

CHECKS = [name for name in checks.names() if name.startswith("gpu_")] + ["xid", "dcgm", "dcgm_stress"]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A kind of node, as nvidia-smi would show it."""

    model: str
    gpus: int
    schema: str
    driver: str
    cuda: str
    memory_mib: int
    power_w: int
    gen: str  # current/max
    width: str  # current/max
    links: int = 0
    fabric: bool = False
    ecc: bool = True
    remap: bool = True
    retire: bool = False
    mig: bool = True


H100 = Node(model="NVIDIA H100 80GB HBM3", gpus=8, schema="v12", driver="535.183.01", cuda="12.2", memory_mib=81559,
            power_w=700, gen="5/5", width="16x/16x", links=18, fabric=True)  # fmt: skip
A100 = Node(model="NVIDIA A100-SXM4-80GB", gpus=8, schema="v12", driver="550.54.15", cuda="12.4", memory_mib=81920,
            power_w=400, gen="4/4", width="16x/16x", links=12)  # fmt: skip
H200 = replace(H100, model="NVIDIA H200", schema="v13", driver="580.95.05", cuda="13.0", memory_mib=143771)
B200 = replace(H200, model="NVIDIA B200", memory_mib=183359, power_w=1000)
A10G = Node(model="NVIDIA A10G", gpus=4, schema="v11", driver="515.105.01", cuda="11.7", memory_mib=23028, power_w=300,
            gen="1/4", width="8x/16x", mig=False)  # fmt: skip
L4 = replace(A10G, model="NVIDIA L4", gpus=1, schema="v12", driver="550.54.15", cuda="12.4", memory_mib=23034,
             power_w=72, width="16x/16x")  # fmt: skip
T4 = replace(A10G, model="Tesla T4", gpus=1, memory_mib=15360, power_w=70, gen="3/3", remap=False, retire=True)
V100 = replace(T4, model="Tesla V100-SXM2-16GB", gpus=8, memory_mib=16384, power_w=300, width="16x/16x", links=6)
CONSUMER = replace(A10G, model="NVIDIA GeForce RTX 3090", gpus=2, schema="v13", driver="580.95.05", cuda="13.0",
                   memory_mib=24576, power_w=350, ecc=False, remap=False, width="8x/16x")  # fmt: skip

NODES = {
    "8 A100": A100,
    "8 A100 40 GB": replace(A100, model="NVIDIA A100-SXM4-40GB", memory_mib=40960, schema="v11"),
    "2 A100 PCIe": replace(A100, model="NVIDIA A100 80GB PCIe", gpus=2, power_w=300, links=0),
    "8 H100": H100,
    "8 H100, newer driver": replace(H100, schema="v13", driver="580.95.05", cuda="13.0"),
    "4 H100 without NVSwitch": replace(H100, gpus=4, fabric=False),
    "1 H100 PCIe": replace(H100, model="NVIDIA H100 PCIe", gpus=1, power_w=350, links=0, fabric=False),
    "8 H200": H200,
    "1 H200 of a virtual machine": replace(H200, gpus=1, links=0, fabric=False),
    "8 B200": B200,
    "4 GB200": replace(B200, model="NVIDIA GB200", gpus=4, memory_mib=189471, power_w=1200),
    "1 GH200": replace(H200, model="NVIDIA GH200 480GB", gpus=1, memory_mib=97871, links=0, fabric=False),
    "4 A10G": A10G,
    "1 A10G": replace(A10G, gpus=1),
    "8 A10G, v12": replace(A10G, gpus=8, schema="v12", driver="550.54.15", cuda="12.4"),
    "1 L4": L4,
    "8 L4": replace(L4, gpus=8, width="8x/16x"),
    "8 L40S": replace(L4, model="NVIDIA L40S", gpus=8, memory_mib=46068, power_w=350),
    "1 T4": T4,
    "8 V100": V100,
    "2 consumer GPUs": CONSUMER,
}


def shape(machine: Machine, node: Node) -> None:
    """The recorded node turned into another kind."""
    machine.gpus(node.gpus)
    text = smi_text([f"0000:{16 + n:02x}:00.0" for n in range(node.gpus)], attached=node.gpus)
    text = text.replace("580.159.04", node.driver).replace("<cuda_version>13.0", f"<cuda_version>{node.cuda}")
    gen, width = node.gen.split("/"), node.width.split("/")
    link = "pci/pci_gpu_link_info"
    changes: dict[str, str | None] = {
        "product_name": node.model,
        "fb_memory_usage/total": f"{node.memory_mib} MiB",
        f"{link}/pcie_gen/current_link_gen": gen[0],
        f"{link}/pcie_gen/max_link_gen": gen[1],
        f"{link}/link_widths/current_link_width": width[0],
        f"{link}/link_widths/max_link_width": width[1],
        **{f"gpu_power_readings/{name}_power_limit": f"{node.power_w}.00 W" for name in ("current", "default")},
    }
    if node.fabric:
        changes |= {"fabric/state": "Completed", "fabric/status": "Success"}
    if not node.ecc:
        changes |= {"ecc_mode/current_ecc": "N/A", "ecc_errors": "N/A"}
    if not node.remap:
        changes |= {"remapped_rows": "N/A"}
    if node.retire:
        kinds = ("multiple_single_bit", "double_bit")
        changes |= {f"retired_pages/{kind}_retirement/retired_count": "0" for kind in kinds}
        changes |= {"retired_pages/pending_retirement": "No", "retired_pages/pending_blacklist": "No"}
    if not node.mig:
        changes |= {"mig_mode/current_mig": "N/A", "mig_mode/pending_mig": "N/A"}
    machine.smi(age(edit_smi(text, None, changes), node.schema))
    known = of_gpu(node.model)
    machine.nvlinks(node.gpus, links=node.links, gbps=1.0625 * ((known and known.nvlink_gbps) or 25))
    major = node.cuda.split(".")[0]
    line = shlex.join(["python3", "-c", gpu_compat.SCRIPT])
    machine.command(line, f"cuda: Optional[str] = '{max(major, '11')}.{'8' if major < '13' else '0'}'\n")
    for level in (1, 3):
        machine.refuses(f"dcgmi diag -r {level} -j", "CommandMissing", "dcgmi is not on this machine")


def age(text: str, schema: str) -> str:
    """What older schemas name otherwise or do not have, as drivers 515 (v11) and 535 (v12) print it."""
    if schema == "v13":
        return text
    root = ET.fromstring(text)
    for gpu in root.findall("gpu"):
        for tag in ("gpu_recovery_action", "clocks_event_reasons_counters", *(["fabric"] if schema == "v11" else [])):
            gpu.remove(found(gpu, tag))
        for part in ("volatile", "aggregate"):
            counts = found(gpu, "ecc_errors").find(part)
            if counts is not None:
                counts.remove(found(counts, "sram_uncorrectable_secded"))
                found(counts, "sram_uncorrectable_parity").tag = "sram_uncorrectable"
        power = found(gpu, "gpu_power_readings")
        power.remove(found(power, "instant_power_draw"))
        found(power, "average_power_draw").tag = "power_draw"
        if schema == "v11":
            power.tag = "power_readings"
            found(power, "current_power_limit").tag = "power_limit"
            events = found(gpu, "clocks_event_reasons")
            for item in (events, *events):
                item.tag = item.tag.replace("event", "throttle")
    return ET.tostring(root, encoding="unicode")


def found(node: ET.Element, tag: str) -> ET.Element:
    inner = node.find(tag)
    assert inner is not None, tag
    return inner


def test_there_are_twenty_kinds() -> None:
    assert len(NODES) >= 20


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


@pytest.mark.parametrize("name", gpus())
def test_a_healthy_node_of_every_model_in_the_table_raises_no_alarm(machine: Machine, name: str) -> None:
    shape(machine, of_table(name))
    results = checks.run(machine.host, Expect(), level=1, only=[check for check in CHECKS if "dcgm" not in check])
    wrong = [(result.check, f) for result in results for f in result.findings if f.verdict not in ("pass", "skip")]
    assert wrong == []
