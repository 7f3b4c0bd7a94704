"""Each GPU has all its PCIe lanes at full speed. Half of them halve every copy to and from the host."""

from __future__ import annotations

import contextlib

from trainmaster.checks import nvidia, profiles
from trainmaster.checks.comparison import hardware
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = True
EXPECTS = ("pcie_gen", "pcie_width")
COMPARES = (
    hardware("max_gen", "PCIe generation", "check the PCIe setting in this node's BIOS"),
    hardware("width", "PCIe lanes", "reseat the GPU or its riser; power-cycle the node"),
)
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
LINK = "pci/pci_gpu_link_info"
WIDTH = f"{LINK}/link_widths/current_link_width"
MAX_GEN = f"{LINK}/pcie_gen/max_link_gen"
UTIL = "utilization/gpu_util"
BUSY_PERCENT = 50.0
REPLAYS, ROLLOVERS = "pci/replay_counter", "pci/replay_rollover_counter"
REPLAYS_WARN = 1000  # ours: link training makes a few, a bad contact thousands


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    peers: dict[str | None, float] = {}
    for gpu in gpus.smi.gpus if gpus.smi else ():
        with contextlib.suppress(nvidia.NotReported):
            peers[gpu.name] = max(peers.get(gpu.name, 0), gpu.number("x", WIDTH))
    newest: dict[str | None, float] = {}
    for gpu in gpus.smi.gpus if gpus.smi else ():
        with contextlib.suppress(nvidia.NotReported):
            newest[gpu.name] = max(newest.get(gpu.name, 0), gpu.number("", MAX_GEN))

    def judge_one(gpu: nvidia.Gpu, device: str) -> Finding:
        return _judge_one(gpu, device, expect, widest=peers.get(gpu.name, 0), newest=newest.get(gpu.name, 0))

    return nvidia.judge_each(gpus, expect, judge_one)


def _judge_one(gpu: nvidia.Gpu, device: str, expect: Expect, *, widest: float, newest: float) -> Finding:
    model = profiles.of_gpu(gpu.name)
    if (
        not gpu.reports(WIDTH)
        and model is not None
        and model.c2c
        and not (expect.pcie_width or expect.pcie_gen or widest)
    ):
        proof = f"a {model.name} is joined to its CPU by NVLink-C2C; its PCIe width is {gpu.text(WIDTH) or 'absent'}"
        return skip("it is not on a PCIe link", proof=proof, device=device)
    width = gpu.number("x", WIDTH)
    # Without a statement or a model that is known, the GPUs of the node are compared with each other: some boards and
    # clouds give a GPU fewer lanes than it has.
    known = model.pcie_width if model and model.pcie_width and model.is_verified("pcie_width") else None
    wanted = expect.pcie_width or known or widest
    if width < wanted:
        action = "reseat the GPU or its riser; power-cycle the node, then test again"
        return fail(f"{width:g} PCIe lanes, not {wanted:g}", action=action, device=device, width=width)
    replays = _replays(gpu, certain=False)
    if replays is not None and replays >= REPLAYS_WARN:
        action = "reseat the GPU or its riser; replace it if the counter rises again"
        return warn(f"{replays:,} PCIe replays since the driver started", action=action, device=device, replays=replays)
    most_width = gpu.number("x", f"{LINK}/link_widths/max_link_width")
    gen, most_gen = (gpu.number("", f"{LINK}/pcie_gen/{name}_link_gen") for name in ("current", "max"))
    values = {"width": width, "max_width": most_width, "gen": gen, "max_gen": most_gen, "replays": replays}
    if expect.pcie_gen is not None and most_gen < expect.pcie_gen:
        action = "use a node of the right type; look at the PCIe setting of its BIOS"
        return fail(f"PCIe generation {most_gen:g}, not {expect.pcie_gen}", action=action, device=device, **values)
    if most_gen < newest:
        action = "reseat the GPU or its riser; see the PCIe setting of its slot"
        reason = f"at most PCIe generation {most_gen:g}, and {newest:g} on an equal GPU of this node"
        return fail(reason, action=action, device=device, **values)
    if gen > most_gen or width > most_width:
        reason = f"it reports {width:g} of {most_width:g} lanes and generation {gen:g} of {most_gen:g}"
        return error(reason, action="reset the GPU or reboot the node", device=device, **values)
    if model is not None and model.pcie_gen is not None and most_gen < model.pcie_gen:
        action = "look at the PCIe setting of the node's BIOS and at its slot"
        reason = f"at most PCIe generation {most_gen:g} here; the {model.name} has {model.pcie_gen}"
        return warn(reason, action=action, device=device, **values)
    replays = _replays(gpu, certain=True)
    if replays is None and not nvidia.is_desktop(gpu):
        gpu.number("", REPLAYS)  # it must report them; N/A is no answer
    # An idle GPU lowers its generation to save power; only a busy one must use all of it.
    busy = (gpu.reports(UTIL) or not nvidia.mig_on(gpu)) and gpu.number(" %", UTIL) >= BUSY_PERCENT
    if busy and gen < most_gen:
        action = "reseat the GPU or its riser; power-cycle the node, then test again"
        return warn(f"PCIe generation {gen:g} of {most_gen:g} while busy", action=action, device=device, **values)
    return ok(f"{width:g} lanes, generation {gen:g} of {most_gen:g}", device=device, **values)


def _replays(gpu: nvidia.Gpu, *, certain: bool) -> int | None:
    """Packets sent again because of damage on the link; None: not reported. `certain`: both counters must be read."""
    if not gpu.reports(REPLAYS):
        return None
    try:
        rollovers = int(gpu.number("", ROLLOVERS))
    except nvidia.NotReported:
        if certain:
            raise
        rollovers = 0
    return int(gpu.number("", REPLAYS)) + rollovers * 4  # the counter has two bits (PCIe specification, REPLAY_NUM)
