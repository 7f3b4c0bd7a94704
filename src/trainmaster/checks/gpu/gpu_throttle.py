"""No GPU is throttled by heat or power, now or since the driver started. A throttled GPU makes all others wait.

A power cap (SW power cap) is normal where a GPU draws its full limit under load, and warns elsewhere.
"""

from __future__ import annotations

import contextlib

from trainmaster.checks import nvidia
from trainmaster.checks.gpu import gpu_power
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# Idle and set clocks are normal operation; they are not here. A software power cap has a rule of its own.
REASONS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake from outside the GPU",
    "sw_thermal_slowdown": "software thermal slowdown",
}
COUNTERS = {
    "hw_therm_slowdown": "heat (hardware)",
    "hw_power_brake": "power brake",
    "sw_therm_slowdown": "heat (software)",
}
# "The SW power scaling algorithm is reducing the clocks … because the GPU is consuming too much power" (NVML, clocks
# event reasons): normal at the full limit under load, and a fault of limit, sensor or supply anywhere else.
CAP = "sw_power_cap"
CAP_SHARE = 0.8  # of the limit; ours: a GPU that is held at its limit draws nearly all of it
SPENT = "clocks_event_reasons_counters"
WARN_S = 10.0  # of slowdown since the driver started; ours: less is one hot start
ACTION = "check cooling and power supply of the node, then test the GPU under load (--level 2)"

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, gpus))


def _judge_one(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus) -> Finding:
    # A reason that is active is judged before one that is not reported.
    active = [name for name in REASONS if gpu.text(*_paths(name)) == "Active"]
    hard = [name for name in active if name != "sw_thermal_slowdown"]
    if hard:
        reason = f"throttled now: {', '.join(REASONS[name] for name in hard)}"
        return fail(reason, action=ACTION, device=device, active=active)
    if active:
        return warn(f"throttled now: {REASONS[active[0]]}", action=ACTION, device=device, active=active)
    if gpu.text(*_paths(CAP)) == "Active" and (cap := _judge_cap(gpu, device, gpus)) is not None:
        return cap
    spent_s = {}
    for name in COUNTERS:
        with contextlib.suppress(nvidia.NotReported):
            spent_s[name] = _spent_s(gpu, name)
    values = {"active": active, "spent_s": {name: spent for name, spent in spent_s.items() if spent is not None}}
    past = {name: spent for name, spent in spent_s.items() if spent is not None and spent >= WARN_S}
    if past:
        words = ", ".join(f"{COUNTERS[name]} for {spent:.0f} s" for name, spent in past.items())
        return warn(f"throttled since the driver started: {words}", action=ACTION, device=device, **values)
    for name in (*REASONS, CAP):
        gpu.yes(*_paths(name))  # every GPU reports these; one that does not was not measured
    for name in COUNTERS:
        _spent_s(gpu, name)
    return ok("not throttled", device=device, **values)


def _judge_cap(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus) -> Finding | None:
    """Finding about clocks that a power cap holds down; None: it is at its full limit, as under any heavy load."""
    limit, usual, draw = (gpu.number(" W", *paths) for paths in (gpu_power.LIMIT, gpu_power.DEFAULT, gpu_power.DRAW))
    others = [peer.number(" W", *gpu_power.LIMIT) for peer in nvidia.same_model(gpus, gpu)
              if peer.reports(*gpu_power.LIMIT)]  # fmt: skip
    values = {"active": [CAP], "limit_w": limit, "default_w": usual, "draw_w": draw}
    full = max([usual, *others])
    if limit < full:
        reason = f"its clocks are held down by a power limit of {limit:g} W, where the default is {usual:g} W"
        reason += f" and equal GPUs have {max(others):g} W" if others and max(others) > limit else ""
        return warn(reason, action=f"raise the limit again: nvidia-smi -pl {full:g}", device=device, **values)
    if draw < limit * CAP_SHARE:
        reason = f"its clocks are held down for power at {draw:g} W of {limit:g} W, which no limit of its own explains"
        return warn(reason, action=ACTION, device=device, **values)
    return None


def _paths(name: str) -> tuple[str, str]:
    """Schema v12 renamed throttling to events."""
    return (
        f"clocks_event_reasons/clocks_event_reason_{name}",
        f"clocks_throttle_reasons/clocks_throttle_reason_{name}",
    )


def _spent_s(gpu: nvidia.Gpu, name: str) -> float | None:
    """Seconds spent so. None: the driver has no such counters (before 550); where it has one, each must be a number."""
    path = f"{SPENT}/clocks_event_reasons_counters_{name}"
    return gpu.number(" us", path) / 1e6 if any(leaf.startswith(SPENT) for leaf in gpu.leaves) else None
