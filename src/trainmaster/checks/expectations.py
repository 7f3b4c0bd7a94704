"""Table of the check that measures each expectation, and the results for stated expectations that no check measured.

An expectation that nothing measured is an error, so the run is INCOMPLETE: it is never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trainmaster.checks import registry
from trainmaster.core.expect import Expect, implies_collectives
from trainmaster.core.results import CheckResult, Finding, error
from trainmaster.core.schema import to_plain

COLLECTIVES = "collectives"  # between ranks: no check of one node measures it
EXPECTATIONS = "expectations"  # result for expectations of a higher level than the run, or of a check left out
OPTIONAL = ("dcgm", "gdr", "fabric", "persistence", "collectives")  # false: the thing may be absent
NAMES = (COLLECTIVES, EXPECTATIONS)  # results that are computed from the plan, and not read from the machine

MEASURED_BY: Mapping[str, str] = {
    "gpus": "gpu_count", "gpu_model": "gpu_model", "gpu_memory_gib": "gpu_memory",
    "gpu_temperature_c": "gpu_temperature", "driver": "gpu_driver", "vbios": "gpu_vbios", "gpu_power_w": "gpu_power",
    "gpu_clock_mhz": "gpu_clocks", "pcie_gen": "gpu_pcie", "pcie_width": "gpu_pcie", "nvlinks": "gpu_nvlink",
    "fabric": "gpu_fabric", "ecc": "gpu_ecc", "mig": "gpu_modes", "persistence": "gpu_modes", "dcgm": "dcgm",
    "xids": "xid", "gemm_tflops": "gemm", "hbm_gbps": "hbm", "h2d_gbps": "pcie_copy", "d2h_gbps": "pcie_copy",
    "p2p_gbps": "p2p", "cpus": "cpu", "ram_gib": "ram", "ram_free_gib": "ram", "disk_free_gib": "disk_space",
    "shm_gib": "shm", "memlock_gib": "memlock", "clock_offset_s": "clock", "load_per_cpu": "cpu_load",
    "governor": "cpu_governor", "numa_nodes": "numa", "swap_used_gib": "swap", "memory_pressure": "memory_pressure",
    "oom_kills": "oom_kills", "disk_write_mib_s": "disk_io", "disk_read_mib_s": "disk_io", "mounts": "mounts",
    "open_files": "open_files", "processes": "processes", "huge_pages": "huge_pages",
    "kernel_modules": "kernel_modules", "ib_ports": "ib_ports", "ib_rate_gbps": "ib_ports",
    "ib_link_layer": "ib_ports", "efa_devices": "efa", "gdr": "gdr", "collectives": COLLECTIVES,
    "busbw_gbps": COLLECTIVES, "transport": COLLECTIVES,
}  # fmt: skip


def unmeasured(
    expect: Expect, *, level: int, left_out: Collection[str] = (), alone: bool = True
) -> tuple[CheckResult, ...]:
    """Results for expectations that a run of this level, without `left_out`, does not measure.

    `alone`: no collectives follow.
    """
    found: list[CheckResult] = []
    implied = implies_collectives(expect) if alone else []
    if implied:
        reason = f"{', '.join(implied)} is expected, and no collectives were run"
        action = "run `trainmaster bandwidth`, or `trainmaster check --level 2 --on TARGET`"
        found.append(_result(COLLECTIVES, [error(reason, action=action)]))
    stated = {name: value for name, value in to_plain(expect).items() if _demands(name, value)}
    above = [_above(name, value, level, left_out) for name, value in stated.items()]
    if any(above):
        found.append(_result(EXPECTATIONS, [finding for finding in above if finding is not None]))
    return tuple(found)


def _demands(name: str, value: Any) -> bool:
    """Whether a value must be measured. 0 and false are demands too (`oom_kills=0`, `mig=false`)."""
    return value not in (None, [], ()) and not (value is False and name in OPTIONAL)


def _above(name: str, value: Any, level: int, left_out: Collection[str]) -> Finding | None:
    """Error for an expectation whose check belongs to a higher level or was left out."""
    check = MEASURED_BY[name]
    needed = registry.level_of(check) if check != COLLECTIVES else level
    if needed <= level and check not in left_out:
        return None
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    if needed <= level:
        reason = f"{name}={shown} is expected, and {check}, which measures it, was left out"
        return error(reason, action=f"run {check}, or leave the expectation out")
    reason = f"{name}={shown} is expected, and {check}, which measures it, was not run at level {level}"
    return error(reason, action=f"run `trainmaster check --level {needed}`, or leave the expectation out")


def _result(check: str, findings: Iterable[Finding]) -> CheckResult:
    return CheckResult(check=check, findings=tuple(findings), took_s=0.0)
