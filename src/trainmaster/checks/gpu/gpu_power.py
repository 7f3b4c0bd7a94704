"""Each GPU may draw its full power. A lowered limit makes it slow under load and shows nowhere else."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.checks.comparison import setting
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ("gpu_power_w",)
COMPARES = (setting("limit_w", "GPU power limit", alike=True, unit="W"),)
METRICS = {"gpu.power_draw_w": "draw_w"}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# Schema v11 calls the part power_readings; the draw is an average or a moment from v12 on.
LIMIT = ("gpu_power_readings/current_power_limit", "gpu_power_readings/power_limit", "power_readings/power_limit")
DEFAULT = ("gpu_power_readings/default_power_limit", "power_readings/default_power_limit")
# Of the module, which has CPU and GPU (Grace Blackwell): a lowered one takes power from the GPU.
MODULE_LIMIT, MODULE_DEFAULT = (f"module_power_readings/{name}_power_limit" for name in ("current", "default"))
DRAW = (
    "gpu_power_readings/instant_power_draw",
    "gpu_power_readings/average_power_draw",
    "gpu_power_readings/power_draw",
    "power_readings/power_draw",
)
MOST_W = 5000.0  # no GPU draws as much; a sensor that says so is broken

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, expect.gpu_power_w))


def _judge_one(gpu: nvidia.Gpu, device: str, wanted: float | None) -> Finding:
    limit = gpu.number(" W", *LIMIT)
    if wanted is not None and limit < wanted:
        reason = f"its power limit is {limit:g} W, not {wanted:g} W"
        return fail(reason, action=f"raise it again: nvidia-smi -pl {wanted:g}", device=device, limit_w=limit)
    usual = gpu.number(" W", *DEFAULT)
    draw = gpu.number(" W", *DRAW)
    values = {"draw_w": draw, "limit_w": limit, "default_w": usual}
    if not 0 < limit < MOST_W or not 0 < draw < MOST_W:
        return error(
            f"implausible readings: {draw:g} W of {limit:g} W", action=nvidia.RESET_OR_REBOOT, device=device, **values
        )
    action = f"raise the limit again: nvidia-smi -pl {usual:g}"
    if limit < usual:
        return warn(
            f"its power limit was lowered to {limit:g} W from {usual:g} W", action=action, device=device, **values
        )
    if gpu.reports(MODULE_LIMIT):
        module = gpu.number(" W", MODULE_LIMIT)
        full = gpu.number(" W", MODULE_DEFAULT) if gpu.reports(MODULE_DEFAULT) else module
        if module < full:
            reason = f"the power limit of its module was lowered to {module:g} W from {full:g} W"
            return warn(reason, action=f"raise it again: nvidia-smi -pl {full:g} -sc 1", device=device, **values)
    return ok(f"{draw:g} W of {limit:g} W", device=device, **values)
