"""Each GPU has all its PCIe lanes at full speed. Half of them halve every copy to and from the host."""

from __future__ import annotations

import contextlib

from trainmaster.checks import nvidia, profiles
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
LINK = "pci/pci_gpu_link_info"
WIDTH = f"{LINK}/link_widths/current_link_width"
UTIL = "utilization/gpu_util"
BUSY_PERCENT = 50.0


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    peers: dict[str | None, float] = {}
    for gpu in gpus.smi.gpus if gpus.smi else ():
        with contextlib.suppress(nvidia.NotTold):
            peers[gpu.name] = max(peers.get(gpu.name, 0), gpu.number("x", WIDTH))
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, expect, peers.get(gpu.name, 0)))


def _judge_one(gpu: nvidia.Gpu, device: str, expect: Expect, widest: float) -> Finding:
    width, most_width = gpu.number("x", WIDTH), gpu.number("x", f"{LINK}/link_widths/max_link_width")
    gen, most_gen = (gpu.number("", f"{LINK}/pcie_gen/{name}_link_gen") for name in ("current", "max"))
    model = profiles.of_gpu(gpu.name)
    # Without a statement or a model that is known, the GPUs of the node are compared with each other: some boards and
    # clouds give a GPU fewer lanes than it has.
    wanted = expect.pcie_width or (model.pcie_width if model else None) or widest
    values = {"width": width, "max_width": most_width, "gen": gen, "max_gen": most_gen}
    if width < wanted:
        action = "reseat the GPU or its riser; power-cycle the node, then test again"
        return fail(f"{width:g} PCIe lanes, not {wanted:g}", action=action, device=device, **values)
    if expect.pcie_gen is not None and most_gen < expect.pcie_gen:
        action = "use a node of the right type; look at the PCIe setting of its BIOS"
        return fail(f"PCIe generation {most_gen:g}, not {expect.pcie_gen}", action=action, device=device, **values)
    if model is not None and model.pcie_gen is not None and most_gen < model.pcie_gen:
        action = "look at the PCIe setting of the node's BIOS and at its slot"
        reason = f"at most PCIe generation {most_gen:g} here; the {model.name} has {model.pcie_gen}"
        return warn(reason, action=action, device=device, **values)
    # An idle GPU lowers its generation to save power; only a busy one must use all of it.
    busy = gpu.tells(UTIL) and gpu.number(" %", UTIL) >= BUSY_PERCENT
    if busy and gen < most_gen:
        action = "reseat the GPU or its riser; power-cycle the node, then test again"
        return warn(f"PCIe generation {gen:g} of {most_gen:g} while busy", action=action, device=device, **values)
    return ok(f"{width:g} lanes, generation {gen:g} of {most_gen:g}", device=device, **values)
