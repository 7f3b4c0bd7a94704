"""Each GPU has all its PCIe lanes at full speed, or NVLink-C2C. Half the lanes halve every copy to and from the host.

C2C joins a GPU to the Grace CPU of its superchip; `c2c_mode` of nvidia-smi says whether it is on (NVML,
nvmlDeviceGetC2cModeInfoV). Boards without it report Disabled or N/A.
"""

from __future__ import annotations

import contextlib

from trainmaster.checks import nvidia, profiles
from trainmaster.checks.comparison import hardware
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, fail, ok, skip, warn

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
GEN = f"{LINK}/pcie_gen/current_link_gen"
C2C = "c2c_mode"
C2C_SINCE = 550  # from this driver on nvidia-smi -q reports it
UTIL = "utilization/gpu_util"
LEAST_PEERS = 3  # ours: so many equal idle GPUs that agree show what this one should have
BUSY_PERCENT = 50.0
REPLAYS, ROLLOVERS = "pci/replay_counter", "pci/replay_rollover_counter"
REPLAYS_WARN = 1000  # ours: link training makes a few, a bad contact thousands

read = nvidia.read


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
        off = _judge_c2c(gpu, device, gpus)
        if off is not None and off.verdict is Verdict.FAIL:
            return off
        widest = peers.get(gpu.name, 0)
        found = _judge_one(gpu, device, expect, widest=widest, newest=newest.get(gpu.name, 0))
        slow = _judge_idle(gpu, device, gpus) if found.verdict is Verdict.PASS else None
        return slow or (off if off is not None and found.verdict in (Verdict.PASS, Verdict.SKIP) else found)

    return nvidia.judge_each(gpus, expect, judge_one)


def _judge_c2c(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus) -> Finding | None:
    """Fault of the link to the Grace CPU; None: it is on, or the GPU has none."""
    word = gpu.text(C2C)
    model = profiles.of_gpu(gpu.name)
    joined = model is not None and model.c2c
    if not gpu.reports(C2C) and joined and nvidia.driver_major(gpus) >= C2C_SINCE:
        reason = f"the driver reports {word[:20] or 'nothing'!r} for the NVLink-C2C that it has"
        return error(reason, action="run `nvidia-smi c2c -s`; update the driver", device=device)
    if not gpu.reports(C2C) or word == "Enabled":
        return None  # no superchip, or a driver that does not report it
    if word != "Disabled":
        reason = f"the driver reports {word[:20]!r} for its NVLink-C2C"
        return error(reason, action="run `nvidia-smi c2c -s`; update the driver", device=device)
    on = sum(other.text(C2C) == "Enabled" for other in nvidia.same_model(gpus, gpu))
    if not on and not joined:
        return None
    reason = "its NVLink-C2C to the CPU is off" + (f", and on at {on} equal GPUs of this node" if on else "")
    action = "see the kernel log for C2C errors (Xid 121); power-cycle the node, and replace the board if it stays"
    return fail(reason, action=action, device=device, c2c=word)


def _judge_idle(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus) -> Finding | None:
    """Warning about a module that runs at a lower PCIe generation than its idle peers; None: it does not.

    A PCIe board lowers its generation when it is idle, each at its own time; the modules of a baseboard keep theirs.
    The generation is of a moment, so this only warns: pcie_copy of level 2 measures what it costs.
    """
    model = profiles.of_gpu(gpu.name)
    if model is None or not (model.fabric or model.nvlinks) or not gpu.reports(GEN):
        return None
    gens = [int(other.number("", GEN)) for other in nvidia.same_model(gpus, gpu) if other.reports(GEN)]
    gen = int(gpu.number("", GEN))
    if len(gens) < LEAST_PEERS or gen >= min(gens):
        return None
    reason = f"PCIe generation {gen}, where its {len(gens)} equal GPUs run at {min(gens)} or more"
    action = "test its copies (--level 2); reseat the GPU or its riser and power-cycle the node if they are slow"
    return warn(reason, action=action, device=device, gen=gen)


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
        return error(reason, action=nvidia.RESET_OR_REBOOT, device=device, **values)
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
