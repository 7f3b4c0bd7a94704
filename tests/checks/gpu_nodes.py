"""Kinds of healthy GPU nodes, as nvidia-smi shows them: the recorded H200 in the shape of another model and driver."""

from __future__ import annotations

import functools
import shlex
import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace

from machines import Machine, edit_smi, smi_text
from trainmaster.checks.gpu import gpu_compat
from trainmaster.core.gpus import of_gpu


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
    "8 B300": replace(B200, model="NVIDIA B300 SXM6 AC", memory_mib=275040, power_w=1100),
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
    known = of_gpu(node.model)
    if known is not None and known.c2c:
        changes["c2c_mode"] = "Enabled"
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
    machine.nvlinks(node.gpus, links=node.links, gbps=1.0625 * ((known and known.nvlink_gbps) or 25))
    major = node.cuda.split(".")[0]
    line = shlex.join(["python3", "-c", gpu_compat.SCRIPT])
    machine.command(line, f"cuda: Optional[str] = '{max(major, '11')}.{'8' if major < '13' else '0'}'\n")
    for level in (1, 3):
        machine.refuses(f"dcgmi diag -r {level} -j", "CommandMissing", "dcgmi is not on this machine")


@functools.lru_cache(maxsize=64)
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
