"""A recorded node whose GPUs answer the probes as a test wants: healthy H200s, changed report by report."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable
from typing import Any

from machines import Machine
from trainmaster.checks.active import _probe

TORCH = {"torch": "2.11.0+cu130", "cuda": "13.0"}
DIGEST = {name: f"{number:032x}" for number, name in enumerate(("gemm", "gemm_exact", "attention", "training"), 1)}
# Which probe a check runs, with which options.
PROBE = {"memory_whole": ("memory_pattern", "--whole")}

Report = dict[str, Any]


def uuid(number: int) -> str:
    return f"GPU-00000000-1111-2222-3333-{number:012x}"


def rates(*rounds: float) -> dict[str, Any]:
    middle = sorted(rounds)[len(rounds) // 2]
    return {"best": max(rounds), "median": middle, "rounds": list(rounds), "spread": 0.01, "repeats": 300}


def results(probe: str) -> dict[str, Any]:
    """What a healthy H200 reports."""
    ecc = {"corrected": 0, "uncorrected": 0}
    if probe == "cuda_init":
        return {"allocation_s": 0.4, "kernel_s": 0.01, "sum": 7, "sum_expected": 7, "copied_back": True}
    if probe == "gemm":
        rounds = {"bf16": (665.3, 665.3, 665.1), "fp16": (664.0, 664.2, 628.1), "tf32": (332.8, 337.0, 344.1)}
        wrong = {"bf16": 1.7e-3, "fp16": 2e-4, "tf32": 3e-4, "fp8": 1.7e-3}
        every = {**rounds, "fp8": (1263.0, 1235.0, 1236.0)}
        told = {n: {"available": True, **rates(*every[n]), "relative_error": wrong[n]} for n in every}
        burst = rates(784.0, 788.0, 786.0)
        return {"size": 8192, "precisions": told, "burst": burst, "before": None, "after": None}
    if probe == "hbm":
        return {
            "buffer_bytes": 4 << 30,
            "copy": rates(4230.0, 4237.0, 4235.0),
            "triad": rates(4300.0, 4310.0, 4305.0),
            "copy_wrong": 0,
            "triad_wrong": 0,
        }
    if probe == "pcie_copy":
        together = {"h2d": 55.0, "d2h": 54.0, "both": 98.0, "began": 1000.0, "ended": 1001.0}
        both = {"h2d": rates(55.4, 55.5, 55.5), "d2h": rates(55.2, 55.3, 55.3), "both": rates(100.0, 101.0, 101.0)}
        return {"cpus": "0-47", "buffer_bytes": 256 << 20, "together": together, **both, "wrong": 0}
    if probe == "memory_pattern":
        return {
            "bytes": 34 << 30,
            "memory_bytes": 140 << 30,
            "patterns": ["zeros", "ones"],
            "wrong_words": 0,
            "wrong": [],
            "seconds": 1.2,
            "ecc_before": ecc,
            "ecc_after": ecc,
        }
    if probe == "corruption":
        work = {n: {"digest": d, "repeats": 20, "different_repeats": 0, "different": 0} for n, d in DIGEST.items()}
        for told in work.values():
            told["finite"] = True
        work["gemm_exact"]["wrong"] = 0
        work["attention"]["backend"] = "flash_attention"
        return {"size": 4096, "work": work, "settings": {}}
    if probe == "burn":
        sample = {"at_s": 0.0, "tflops": 760.0, "temperature_c": 62, "throttle": ["power_cap"]}
        return {
            "size": 8192,
            "digest": "0" * 32,
            "different": 0,
            "samples": [{**sample, "at_s": float(second)} for second in range(300)],
            "seconds": 300.4,
            "tflops_cold": 760.0,
            "tflops_end": 741.0,
            "temperature_max_c": 66,
            "power_max_w": 699.0,
            "sm_min_mhz": 1605,
            "throttle": {"power_cap": 280},
            "ecc_before": ecc,
            "ecc_after": ecc,
        }
    raise KeyError(probe)


def report(probe: str, number: int, *, name: str = "NVIDIA H200") -> Report:
    device = {"type": "cuda", "name": name, "uuid": uuid(number), **TORCH}
    device |= {"memory_bytes": 140 << 30, "free_bytes": 139 << 30}
    return {"v": 1, "probe": probe, "device": device, "results": results(probe), "error": None, "took_s": 4.0}


def line(check: str, number: int) -> str:
    probe, *options = PROBE.get(check, (check,))
    return shlex.join(_probe.command(probe, uuid(number), *options))


def answer(
    machine: Machine, check: str, count: int, change: Callable[[int, Report], object] = lambda n, r: None, **kind: Any
) -> None:
    """A node of `count` GPUs that all answer this check's probe; `change` may damage each report."""
    machine.gpus(count)
    machine.answer("env", "CUDA_VISIBLE_DEVICES", None)
    for number in range(count):
        told = copy.deepcopy(report(PROBE.get(check, (check,))[0], number, **kind))
        change(number, told)
        code = 0 if told["error"] is None else 1
        machine.command(line(check, number), json.dumps(told) + "\n", exit_code=code)


def only(wanted: int, change: Callable[[Report], object]) -> Callable[[int, Report], object]:
    """Damage the report of one GPU."""
    return lambda number, told: change(told) if number == wanted else None
