"""The driver asks for no recovery action. It does when it cannot repair an error of a GPU by itself."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, skip
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
PATH = "gpu_recovery_action"
# nvmlDeviceGpuRecoveryAction_t, as nvidia-smi writes it.
ACTIONS = {
    "reset": "drain the node and reset the GPU",
    "gpu reset": "drain the node and reset the GPU",
    "reboot": "drain the node and reboot it",
    "node reboot": "drain the node and reboot it",
    "drain p2p": "end all work that uses NVLink on this GPU, then look again",
    "drain and reset": "drain the node and reset the GPU",
}


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, _judge_one)


def _judge_one(gpu: nvidia.Gpu, device: str) -> Finding:
    if not gpu.said(PATH):
        # Added with driver 550. Without it the kernel log (Xid 154) is the evidence.
        return skip(
            "this driver has no recovery action", proof="nvidia-smi -q has no gpu_recovery_action", device=device
        )
    said = gpu.word(PATH)
    if said == "None":
        return ok("no recovery action", device=device, recovery=said)
    # A word that is not known is still something the driver wants done.
    action = ACTIONS.get(said.lower(), f"do what the driver asks for: {said[:60]}")
    return fail(f"the driver asks for: {said[:60]}", action=action, device=device, recovery=said)
