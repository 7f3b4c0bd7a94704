"""No GPU is hot before the work starts. One that is hot while idle slows down under load, and its job with it."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# Data-centre GPUs idle at 30 to 60 °C and slow down near 87 °C (A100, H100 datasheets).
WARN_C = 75.0
FAIL_C = 87.0
PLAUSIBLE_C = (0.0, 150.0)  # a sensor that says less or more is broken


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, expect.gpu_temperature_c))


def _judge_one(gpu: nvidia.Gpu, device: str, limit_c: float | None) -> Finding:
    now = gpu.temperature_c
    if now is None or not PLAUSIBLE_C[0] < now < PLAUSIBLE_C[1]:
        told = f"it tells no temperature: {gpu.texts['temperature']}"
        return error(told, action="reset the GPU or reboot the node", device=device)
    action = "check fans, coolant and airflow of the node, and what else runs on the GPU"
    if gpu.headroom_c is not None and gpu.headroom_c <= 0:
        reason = f"{now:g} °C, no headroom left: it is slowing itself down"
        return fail(reason, action=action, device=device, celsius=now, headroom_c=gpu.headroom_c)
    if now > (FAIL_C if limit_c is None else limit_c):
        return fail(f"{now:g} °C before the work starts", action=action, device=device, celsius=now)
    if limit_c is None and now > WARN_C:
        return warn(f"{now:g} °C before the work starts", action=action, device=device, celsius=now)
    return ok(f"{now:g} °C", device=device, celsius=now)
