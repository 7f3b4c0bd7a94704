"""Power, clocks, temperature and utilisation of a GPU while it trains, sampled by a thread."""

from __future__ import annotations

import threading
from statistics import fmean, median
from types import TracebackType
from typing import Any

import torch

from trainmaster.bench.nvml import Sensor, open_sensor

_EVERY_S = 0.2


class Sampler:
    """Samples from `with` to its end; `summary` is None where there is no sensor."""

    def __init__(self, device: torch.device) -> None:
        self._sensor: Sensor | None = open_sensor(device)
        self._samples: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        if self._sensor is not None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, args=(self._sensor,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()

    def _run(self, sensor: Sensor) -> None:
        while True:
            self._samples.append({**sensor.sample(), "utilisation_percent": sensor.utilisation()})
            if self._stop.wait(_EVERY_S):
                return

    def summary(self) -> dict[str, Any] | None:
        return summarise(self._samples)


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Means, extremes and throttle reasons of samples; None without any."""
    if not samples:
        return None

    def values(name: str) -> list[float]:
        return [sample[name] for sample in samples if sample.get(name) is not None]

    def over(numbers: list[float], of: Any) -> float | None:
        return round(float(of(numbers)), 1) if numbers else None

    reasons = [reason for sample in samples for reason in sample.get("throttle") or ()]
    return {
        "samples": len(samples),
        "power_w": over(values("power_w"), fmean),
        "power_w_max": over(values("power_w"), max),
        "sm_mhz": over(values("sm_mhz"), median),
        "sm_mhz_min": over(values("sm_mhz"), min),
        "memory_mhz": over(values("memory_mhz"), median),
        "temperature_c_max": over(values("temperature_c"), max),
        "utilisation_percent": over(values("utilisation_percent"), fmean),
        "throttle": {reason: round(reasons.count(reason) / len(samples), 3) for reason in sorted(set(reasons))},
    }
