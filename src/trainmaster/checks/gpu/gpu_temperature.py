"""No GPU is hot before the work starts. One that is hot while idle slows down under load, and its job with it."""

from __future__ import annotations

from trainmaster.checks import nvidia, profiles
from trainmaster.checks.comparison import Peer
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ("gpu_temperature_c",)
COMPARES = (
    Peer(
        name="celsius",
        words="temperature",
        unit="°C",
        bad="high",
        least_far=12.0,  # intake air differs by some degrees between the bottom and the top of a rack
        share=False,
        action="check this node's fans, coolant and airflow",
        everywhere=True,
    ),
)
METRICS = {"gpu.temperature_c": "celsius"}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# Data-centre GPUs idle at 30 to 60 °C and slow down near 87 °C (A100, H100 datasheets).
WARN_C = 75.0
FAIL_C = 87.0
PLAUSIBLE_C = (0.0, 150.0)  # a sensor that reports less or more is broken
# HBM slows down near 95 °C (nvidia-smi's memory max operating temperature of A100 and H100).
MEMORY_WARN_C, MEMORY_FAIL_C = 90.0, 95.0
MEMORY, MEMORY_LIMIT = "temperature/memory_temp", "temperature/gpu_temp_max_mem_threshold"
HEADROOM, SLOWDOWN = "temperature/gpu_temp_tlimit", "temperature/gpu_temp_slow_threshold"
ACTION = "check fans, coolant and airflow of the node, and what else runs on the GPU"

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, gpus, expect.gpu_temperature_c))


def _judge_one(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus, limit_c: float | None) -> Finding:
    now, memory = gpu.temperature_c, gpu.find_number(" C", MEMORY)
    values = {"celsius": now, "memory_celsius": memory, "headroom_c": gpu.headroom_c}
    # What is too hot is judged before what is not reported.
    hot = _too_hot(gpu, limit_c)
    if hot is not None:
        return fail(f"{hot} before the work starts", action=ACTION, device=device, **values)
    if now is None or not PLAUSIBLE_C[0] < now < PLAUSIBLE_C[1]:
        return error(
            f"it reports no temperature: {gpu.texts['temperature']}", action=nvidia.RESET_OR_REBOOT, device=device
        )
    if memory is None and _must_tell_memory(gpu, gpus):
        reason = f"it reports no memory temperature: {gpu.text(MEMORY) or 'nothing'}"
        return error(reason, action=nvidia.RESET_OR_REBOOT, device=device)
    if gpu.headroom_c is None and gpu.find_number(" C", SLOWDOWN) is None and not nvidia.is_desktop(gpu):
        reason = f"it reports no temperature limit: {gpu.text(HEADROOM, SLOWDOWN) or 'nothing'}"
        return error(reason, action=nvidia.RESET_OR_REBOOT, device=device)
    if limit_c is None and now > WARN_C:
        return warn(f"{now:g} °C before the work starts", action=ACTION, device=device, **values)
    if memory is not None and memory > MEMORY_WARN_C:
        return warn(f"memory at {memory:g} °C before the work starts", action=ACTION, device=device, **values)
    return ok(f"{now:g} °C" + (f", memory {memory:g} °C" if memory is not None else ""), device=device, **values)


def _too_hot(gpu: nvidia.Gpu, limit_c: float | None) -> str | None:
    """What is too hot, as words; None: nothing that is reported."""
    now, memory = gpu.temperature_c, gpu.find_number(" C", MEMORY)
    if gpu.headroom_c is not None and gpu.headroom_c <= 0:
        return f"{gpu.texts['temperature']}: no headroom left, it throttles"
    slowdown = gpu.find_number(" C", SLOWDOWN)
    limit = limit_c if limit_c is not None else min(FAIL_C, slowdown if slowdown else FAIL_C)
    if now is not None and limit < now < PLAUSIBLE_C[1]:
        return f"{now:g} °C"
    most = gpu.find_number(" C", MEMORY_LIMIT)
    if memory is not None and memory > (most if most else MEMORY_FAIL_C):
        return f"memory at {memory:g} °C"
    return None


def _must_tell_memory(gpu: nvidia.Gpu, gpus: nvidia.Gpus) -> bool:
    """HBM reports its temperature; GDDR does not."""
    model = profiles.of_gpu(gpu.name)
    if model is not None and model.memory_kind is not None:
        return model.memory_kind.startswith("HBM")
    return nvidia.peers_report(gpus, gpu, MEMORY)
