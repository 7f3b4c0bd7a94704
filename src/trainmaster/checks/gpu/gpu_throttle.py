"""No GPU is being slowed down by heat or power, now or before. A throttled GPU makes every other one wait."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# Idle, a software power cap and clocks that somebody set are how a healthy GPU works; they are not here.
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
WARN_S = 10.0  # of slowdown since the driver started; ours: less is one hot start
ACTION = "check cooling and power supply of the node, then test the GPU under load (--level 2)"


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, _judge_one)


def _judge_one(gpu: nvidia.Gpu, device: str) -> Finding:
    gpu.yes(*_paths("hw_slowdown"))  # every GPU tells this one; one that does not was not measured
    active = [name for name in REASONS if _is_active(gpu, name)]
    hard = [name for name in active if name != "sw_thermal_slowdown"]
    spent_s = {name: _spent_s(gpu, name) for name in COUNTERS}
    values = {"active": active, "spent_s": {name: spent for name, spent in spent_s.items() if spent is not None}}
    if hard:
        reason = f"it is slowed down now: {', '.join(REASONS[name] for name in hard)}"
        return fail(reason, action=ACTION, device=device, **values)
    if active:
        return warn(f"it is slowed down now: {REASONS[active[0]]}", action=ACTION, device=device, **values)
    past = {name: spent for name, spent in spent_s.items() if spent is not None and spent >= WARN_S}
    if past:
        words = ", ".join(f"{COUNTERS[name]} for {spent:.0f} s" for name, spent in past.items())
        return warn(f"it was slowed down since the driver started: {words}", action=ACTION, device=device, **values)
    return ok("not slowed down", device=device, **values)


def _is_active(gpu: nvidia.Gpu, name: str) -> bool:
    """A reason that is N/A is never active; one that is gone from the list was not measured."""
    return gpu.yes(*_paths(name)) if gpu.tells(*_paths(name)) or not gpu.said(*_paths(name)) else False


def _paths(name: str) -> tuple[str, str]:
    """Schema v12 renamed throttling to events."""
    return (
        f"clocks_event_reasons/clocks_event_reason_{name}",
        f"clocks_throttle_reasons/clocks_throttle_reason_{name}",
    )


def _spent_s(gpu: nvidia.Gpu, name: str) -> float | None:
    path = f"clocks_event_reasons_counters/clocks_event_reasons_counters_{name}"
    return gpu.number(" us", path) / 1e6 if gpu.tells(path) else None
