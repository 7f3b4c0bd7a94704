"""How a GPU holds up under full load for minutes: rate, clock, temperature, power and throttling, every second.

Matrix products without a pause draw the most power a chip will draw. What fails only when hot fails here, so every
window's last product is also compared, bit by bit, with the first one.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from trainmaster.bench import nvml
from trainmaster.bench.probe import _bits
from trainmaster.bench.probe._run import Run, wait
from trainmaster.bench.probe._timing import time_each
from trainmaster.bench.probe.gemm import pick_size

SECONDS = 300.0  # heat has settled in a rack after two or three minutes
DEADLINE_S = SECONDS + 90.0
WINDOW_S = 1.0
COLD_S = 10.0  # the beginning, before heat and power limits show; a sag is measured from there


def measure(run: Run) -> None:
    run.results["settings"] = _bits.settle()
    seconds = SECONDS if run.seconds is None else run.seconds
    window_s = WINDOW_S if run.on_gpu else 0.05
    size = pick_size(run)
    run.step("first product")
    left, right = (_bits.draw((size, size), seed=seed, levels=_bits.FULL, device=run.device) for seed in (1, 2))
    first = torch.mm(left, right)
    out = torch.empty_like(first)
    wait(run.device)
    one_s = statistics.median(time_each(run.device, lambda: torch.mm(left, right, out=out), 5))
    count = max(1, round(window_s / one_s))
    sensor = nvml.open_sensor(run.device)
    samples: list[dict[str, Any]] = []
    run.results.update(size=size, digest=_bits.digest(first), different=0, samples=samples)
    run.results["ecc_before"] = sensor.memory_errors() if sensor else None
    started = time.perf_counter()
    while (now := time.perf_counter() - started) < seconds:
        run.step(f"burning, second {now:.0f}")
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right, out=out)
        sample = sensor.sample() if sensor else {}  # asked while the products run: idle it would tell nothing
        wait(run.device)
        took = time.perf_counter() - began
        samples.append({"at_s": round(now, 2), "tflops": float(f"{2 * size**3 * count / took / 1e12:.5g}"), **sample})
        run.results["different"] += _bits.count_different(first, out)
        run.results["seconds"] = round(time.perf_counter() - started, 2)
    run.results["ecc_after"] = sensor.memory_errors() if sensor else None
    run.results.update(summarise(samples))


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The rate when cold and at the end, and the extremes of what was sensed."""
    rates = [float(sample["tflops"]) for sample in samples]
    cold = [rate for sample, rate in zip(samples, rates, strict=True) if sample["at_s"] < COLD_S]
    last = rates[-max(1, len(rates) // 4) :]

    def extreme(name: str, pick: Any) -> Any:
        values = [sample[name] for sample in samples if sample.get(name) is not None]
        return pick(values) if values else None

    reasons = [reason for sample in samples for reason in sample.get("throttle") or ()]
    return {
        "tflops_cold": statistics.median(cold),
        "tflops_end": statistics.median(last),
        "temperature_max_c": extreme("temperature_c", max),
        "power_max_w": extreme("power_w", max),
        "sm_min_mhz": extreme("sm_mhz", min),
        # In how many of the samples each reason stood.
        "throttle": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }
