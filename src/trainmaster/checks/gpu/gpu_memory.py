"""Each GPU has its full memory, and no other program uses it."""

from __future__ import annotations

from trainmaster.checks import nvidia, profiles
from trainmaster.checks.comparison import hardware
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ("gpu_memory_gib",)
COMPARES = (hardware("total_gib", "GPU memory", "check this GPU's ECC and MIG modes", tolerance=0.02, unit="GiB"),)
METRICS = {"gpu.memory_total_mb": "total_gib", "gpu.memory_used_mb": "used_gib"}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# A desktop or an idle CUDA context takes less; a forgotten training process takes more.
USED_WARN_GIB = 2.0

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, expect.gpu_memory_gib))


def _judge_one(gpu: nvidia.Gpu, device: str, wanted_gib: float | None) -> Finding:
    if not gpu.memory_total_mib:
        reason = f"it reports no memory size: total {gpu.texts['memory_total']}, used {gpu.texts['memory_used']}"
        return error(reason, action=nvidia.RESET_OR_REBOOT, device=device)
    small = _judge_size(gpu, device, wanted_gib)
    if small is not None:
        return small
    if gpu.memory_used_mib is None:
        reason = f"it reports {gpu.memory_total_mib / 1024:.1f} GiB, and no memory in use: {gpu.texts['memory_used']}"
        return error(reason, action=nvidia.RESET_OR_REBOOT, device=device)
    total, used = gpu.memory_total_mib / 1024, gpu.memory_used_mib / 1024
    if used > USED_WARN_GIB:
        return warn(
            f"{used:.1f} of {total:.1f} GiB are in use before the start",
            action="see `nvidia-smi` for the process that holds it and end it",
            device=device,
            total_gib=round(total, 2),
            used_gib=round(used, 2),
        )
    return ok(f"{total:.1f} GiB, {used:.1f} in use", device=device, total_gib=round(total, 2), used_gib=round(used, 2))


def _judge_size(gpu: nvidia.Gpu, device: str, wanted_gib: float | None) -> Finding | None:
    """Finding of a GPU with less memory than stated or than its model has; None: it has enough."""
    total = (gpu.memory_total_mib or 0) / 1024
    model, stated = profiles.of_gpu(gpu.name), wanted_gib is not None
    if wanted_gib is None and model is not None:
        wanted_gib = model.memory_gb * profiles.MEMORY_SHARE
    if wanted_gib is None or total >= wanted_gib:
        return None
    say = fail if stated or (model is not None and model.is_verified("memory_gb")) else warn
    action = "use a GPU with more memory; if ECC or MIG takes it, state less"
    return say(f"{total:.1f} GiB, not {wanted_gib:.4g} GiB", action=action, device=device, total_gib=round(total, 2))
