"""The GPUs are idle before the work starts. A busy one is used by another program."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, ok, skip, warn

LEVEL = 1
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS = {"gpu.utilization_percent": "percent"}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
WARN_PERCENT = 10.0  # reading the GPU alone shows a few percent

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, _judge_one)


def _judge_one(gpu: nvidia.Gpu, device: str) -> Finding:
    if not gpu.reports("utilization/gpu_util") and nvidia.mig_on(gpu):
        return skip("a GPU in MIG mode reports no utilisation", proof="its MIG mode is Enabled", device=device)
    busy = gpu.number(" %", "utilization/gpu_util")
    if busy > WARN_PERCENT:
        reason = f"{busy:g} % busy before the start"
        return warn(reason, action="see gpu_processes; end that work or wait for it", device=device, percent=busy)
    return ok(f"{busy:g} % busy", device=device, percent=busy)
