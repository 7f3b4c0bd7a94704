"""Each GPU may reach its full clock. A lowered clock makes it slow without any error."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.checks.comparison import hardware, setting
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ("gpu_clock_mhz",)
COMPARES = (
    hardware("max_mhz", "highest GPU clock", "reset the GPUs or reboot the node", unit="MHz"),
    setting("allowed_mhz", "allowed GPU clock", alike=True, unit="MHz"),
)
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
UTIL = "utilization/gpu_util"
BUSY_PERCENT = 90.0
_ALLOWED, _DEFAULT = "applications_clocks", "default_applications_clocks"
SLOW_SHARE = 0.5  # of the highest clock; heavy matrix work takes an H100 down to about 0.7

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, expect.gpu_clock_mhz))


def _judge_one(gpu: nvidia.Gpu, device: str, wanted: float | None) -> Finding:
    most, now = gpu.number(" MHz", "max_clocks/sm_clock"), gpu.number(" MHz", "clocks/sm_clock")
    allowed, usual = _set(gpu, _ALLOWED), _set(gpu, _DEFAULT)
    if (allowed is None) != (usual is None) and not nvidia.is_desktop(gpu):
        # One alone cannot show that the clock was lowered.
        path = _ALLOWED if allowed is None else _DEFAULT
        raise nvidia.NotReported(f"{path}/graphics_clock", gpu.text(f"{path}/graphics_clock"), applies=True)
    reach = min(most, allowed if allowed is not None else most)
    values = {"now_mhz": now, "max_mhz": most, "allowed_mhz": allowed, "default_mhz": usual}
    if wanted is not None and reach < wanted:
        reason = f"its highest allowed clock is {reach:g} MHz, not {wanted:g}"
        return fail(reason, action="reset its clocks: nvidia-smi -rac -rgc", device=device, **values)
    if allowed is not None and usual is not None and allowed < usual:
        reason = f"its clock is limited to {allowed:g} MHz; the default is {usual:g}"
        return warn(reason, action="reset its clocks: nvidia-smi -rac", device=device, **values)
    paths = [f"{name}/mem_clock" for name in (_ALLOWED, _DEFAULT)]
    memory, default = (gpu.number(" MHz", path) if gpu.reports(path) else None for path in paths)
    if memory is not None and default is not None and memory < default:
        reason = f"its memory clock is limited to {memory:g} MHz; the default is {default:g}"
        return warn(reason, action="reset its clocks: nvidia-smi -rac", device=device, **values)
    busy = gpu.reports(UTIL) and gpu.number(" %", UTIL) >= BUSY_PERCENT
    if busy and now < most * SLOW_SHARE:
        reason = f"{now:g} of {most:g} MHz while it is busy"
        return warn(
            reason, action="see gpu_throttle and gpu_power; reset its clocks: nvidia-smi -rgc", device=device, **values
        )
    return ok(f"{now:g} of {most:g} MHz", device=device, **values)


def _set(gpu: nvidia.Gpu, name: str) -> float | None:
    """Configured clock. None where the driver has retired the setting (nvidia-smi of driver 580 and later)."""
    path = f"{name}/graphics_clock"
    if not gpu.text(path) or "deprecated" in gpu.text(path) or nvidia.is_desktop(gpu):
        return gpu.number(" MHz", path) if gpu.reports(path) else None
    return gpu.number(" MHz", path)
