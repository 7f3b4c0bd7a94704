"""Do the probes measure what the GPU can do: each probe's rate beside a bare torch loop in the same run.

    PYTHONPATH=src python3 benchmarks/gpu_probe.py              on a machine with a GPU
    PYTHONPATH=src python3 benchmarks/gpu_probe.py --device cpu --rounds 1   tries the script itself

The probe runs as it always does, as a process of its own; the bare loop is timed by the host's clock around all of its
repeats. They take turns, so that heat and clocks favour neither. Ends with 1 if a rate of the chip itself (GEMM in a
burst, copy) is off by more than 3 %. The others are told beside them: what a GPU holds depends on its heat at that
moment, and the link's rates on the host's clock and CPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

LIMIT = 0.03
JUDGED = ("bf16 GEMM TFLOPS, burst", "device copy GB/s")
SIZE, BUFFER_BYTES, LINK_BYTES = 8192, 4 << 30, 256 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description="Probes beside bare torch loops.")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {}
    seconds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for probe, bare in BARE.items():
            document = run_probe(probe, options)
            seconds.setdefault(probe, []).append(document["took_s"])
            for name, rate in RATES[probe](document["results"]).items():
                rows.setdefault(name, {"probe": [], "bare": []})["probe"].append(rate)
            for name, rate in bare(options.device).items():
                rows.setdefault(name, {"probe": [], "bare": []})["bare"].append(rate)
            if options.device == "cuda":
                torch.cuda.empty_cache()  # the next probe finds the memory free
    table = {
        name: {
            "probe": statistics.median(row["probe"]),
            "bare": statistics.median(row["bare"]),
            "ratio": statistics.median(row["probe"]) / statistics.median(row["bare"]),
            "rounds": row,
        }
        for name, row in rows.items()
    }
    if options.json:
        print(json.dumps({"rates": table, "seconds": seconds}, indent=2))
    else:
        show(table, seconds, options)
    worst = max(abs(row["ratio"] - 1) for name, row in table.items() if name in JUDGED)
    return 1 if worst > LIMIT else 0


def show(table: dict[str, dict[str, Any]], seconds: dict[str, list[float]], options: argparse.Namespace) -> None:
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, median of {options.rounds} rounds")
    print(f"{'rate':24} {'probe':>10} {'bare loop':>10} {'ratio':>7}")
    for what, row in table.items():
        off = "" if what not in JUDGED or abs(row["ratio"] - 1) <= LIMIT else f"  off by more than {LIMIT:.0%}"
        print(f"{what:24} {row['probe']:10,.5g} {row['bare']:10,.5g} {row['ratio']:7.3f}{off}")
    for probe, took in seconds.items():
        print(f"probe {probe}: {statistics.median(took):.1f} s from start to end")


def run_probe(name: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "trainmaster.bench.probe", name, "--gpu", options.gpu, "--device", options.device]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if ran.returncode:
        raise SystemExit(f"{name} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def rate(
    device: str, work: Callable[[], object], amount: float, *, warm_up_s: float = 0.3, time_s: float = 0.75
) -> float:
    """Amount per second of a bare loop: as many calls as fit, one wait at the end."""
    if device == "cpu":
        warm_up_s, time_s = warm_up_s / 20, time_s / 20
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    until, calls = time.perf_counter() + warm_up_s, 0
    work()
    wait()
    started = time.perf_counter()
    while time.perf_counter() < until or not calls:
        work()
        wait()
        calls += 1
    count = max(5, round(time_s * calls / (time.perf_counter() - started)))
    started = time.perf_counter()
    for _ in range(count):
        work()
    wait()
    return amount * count / (time.perf_counter() - started)


def bare_gemm(device: str) -> dict[str, float]:
    size = SIZE if device == "cuda" else 128
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    work, amount = lambda: left @ right, 2 * size**3 / 1e12
    return {
        "bf16 GEMM TFLOPS, burst": max(burst(device, work, amount) for _ in range(3)),
        "bf16 GEMM TFLOPS, held": rate(device, work, amount),
    }


def burst(device: str, work: Callable[[], object], amount: float) -> float:
    """Amount per second of ten calls after a rest, which end before the power limit is felt."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    time.sleep(1.0 if device == "cuda" else 0.0)
    for _ in range(5):
        work()
    wait()
    started = time.perf_counter()
    for _ in range(10):
        work()
    wait()
    return amount * 10 / (time.perf_counter() - started)


def bare_hbm(device: str) -> dict[str, float]:
    count = (BUFFER_BYTES if device == "cuda" else 12 << 20) // 4
    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    return {"device copy GB/s": rate(device, lambda: target.copy_(source), 8 * count / 1e9)}


def bare_pcie(device: str) -> dict[str, float]:
    size = LINK_BYTES if device == "cuda" else 1 << 20
    here = torch.ones(size, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.ones(size, dtype=torch.uint8, device=device)
    return {
        "pinned H2D GB/s": rate(device, lambda: there.copy_(here, non_blocking=True), size / 1e9),
        "pinned D2H GB/s": rate(device, lambda: here.copy_(there, non_blocking=True), size / 1e9),
    }


BARE: dict[str, Callable[[str], dict[str, float]]] = {"gemm": bare_gemm, "hbm": bare_hbm, "pcie_copy": bare_pcie}
RATES: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
    "gemm": lambda found: {
        "bf16 GEMM TFLOPS, burst": found["burst"]["best"],
        "bf16 GEMM TFLOPS, held": found["precisions"]["bf16"]["median"],
    },
    "hbm": lambda found: {"device copy GB/s": found["copy"]["median"]},
    "pcie_copy": lambda found: {
        "pinned H2D GB/s": found["h2d"]["median"],
        "pinned D2H GB/s": found["d2h"]["median"],
    },
}

if __name__ == "__main__":
    sys.exit(main())
