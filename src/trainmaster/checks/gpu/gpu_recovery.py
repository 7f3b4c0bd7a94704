"""The driver asks for no recovery action and no reset. It does when it cannot repair an error of a GPU by itself."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip

LEVEL = 1
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
PATH = "gpu_recovery_action"
# Drivers before gpu_recovery_action have only these flags; newer ones report them as deprecated.
FLAGS = ("gpu_reset_status/reset_required", "gpu_reset_status/drain_and_reset_recommended")
SINCE = 570  # from this driver on each GPU reports gpu_recovery_action; some of 550 to 565 do
# nvmlDeviceGpuRecoveryAction_t, as nvidia-smi writes it.
ACTIONS = {
    "reset": nvidia.RESET,
    "gpu reset": nvidia.RESET,
    "reboot": "drain the node and reboot it",
    "node reboot": "drain the node and reboot it",
    "drain p2p": "end all work that uses NVLink on this GPU, then look again",
    "drain and reset": nvidia.RESET,
}

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, gpus))


def _judge_one(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus) -> Finding:
    flags = {path.rpartition("/")[2]: gpu.text(path) for path in FLAGS if gpu.reports(path)}
    raised = [name for name, word in flags.items() if word == "Yes"]
    if raised:
        return fail(f"the driver reports {' and '.join(raised)}", action=nvidia.RESET, device=device, **flags)
    unknown = [f"{name} is {word[:40]}" for name, word in flags.items() if word != "No"]
    if unknown:
        return error(f"{', '.join(unknown)}", action=nvidia.RESET_OR_REBOOT, device=device)
    paths = (PATH,) if nvidia.peers_report(gpus, gpu, PATH) else FLAGS
    silent = [path for path in paths if not gpu.reports(path) and nvidia.peers_report(gpus, gpu, path)]
    if silent:
        reason = f"nvidia-smi reports no {silent[0].rpartition('/')[2]} of this GPU, but of its equal ones"
        return error(reason, action=nvidia.RESET_OR_REBOOT, device=device)
    if flags and not gpu.reports(PATH):
        return ok("no reset required", device=device, **flags)
    driver = gpus.smi.driver if gpus.smi else None
    if not gpu.text(PATH) and nvidia.driver_major(gpus) < SINCE:
        # Without it the kernel log (Xid 154) is the evidence.
        proof = f"nvidia-smi -q of driver {driver} has no gpu_recovery_action"
        return skip("this driver has no recovery action", proof=proof, device=device)
    recovery = gpu.word(PATH)
    if recovery == "None":
        return ok("no recovery action", device=device, recovery=recovery)
    # A word that is not known is still something the driver wants done.
    action = ACTIONS.get(recovery.lower(), f"do what the driver asks for: {recovery[:60]}")
    return fail(f"the driver asks for: {recovery[:60]}", action=action, device=device, recovery=recovery)
