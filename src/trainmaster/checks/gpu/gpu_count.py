"""The GPUs that should be here are here, all of them."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    refused = nvidia.refuse(gpus, expect)
    if refused is not None:
        return [refused]
    assert gpus.smi is not None
    count, listed = nvidia.expected(gpus, expect), len(gpus.smi.gpus)
    found = [_present(slot.gpu, slot.device) if slot.gpu else _missing(slot) for slot in nvidia.slots(gpus, count)]
    if listed == count and gpus.smi.attached == listed:
        return [ok(f"{listed} of {count} GPUs", listed=listed, expected=count), *found]
    shown = f"{listed} of {count} GPUs: nvidia-smi lists {listed} and counts {gpus.smi.attached}, "
    return [
        fail(
            shown + f"the PCI bus shows {len(gpus.bus)}",
            action="drain the node and reboot it; if this process was given a part of them, say so: --expect gpus=N",
            listed=listed,
            attached=gpus.smi.attached,
            on_bus=len(gpus.bus),
            expected=count,
        ),
        *found,
    ]


def _present(gpu: nvidia.Gpu, device: str) -> Finding:
    return ok(f"at {gpu.bus}", device=device, bus=gpu.bus, uuid=gpu.uuid)


def _missing(slot: nvidia.Slot) -> Finding:
    where = f"at {slot.bus} " if slot.bus else ""
    return fail(
        f"not there: nvidia-smi lists no GPU {where}in its place",
        action="look for Xid 79 in the kernel log; power-cycle the node, then replace the GPU",
        device=slot.device,
    )
