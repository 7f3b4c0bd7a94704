"""How fast: tokens per second, and the share of the GPU's peak that they are (MFU)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

# Dense bfloat16 operations per second by the name the driver gives the GPU. NVIDIA's datasheets print the figure with
# sparsity for most of these; dense is half of it. Only exact names: an H200 NVL is not an H200, and a guessed peak
# makes a guessed MFU.
PEAK_BF16 = {
    "NVIDIA A100-SXM4-40GB": 312e12,  # A100 datasheet, June 2021
    "NVIDIA A100-SXM4-80GB": 312e12,  # A100 datasheet, June 2021
    "NVIDIA A100 80GB PCIe": 312e12,  # A100 datasheet, June 2021
    "NVIDIA H100 80GB HBM3": 1979e12 / 2,  # H100 datasheet, SXM column
    "NVIDIA H100 PCIe": 1513e12 / 2,  # H100 datasheet of 2022, PCIe column
    "NVIDIA H200": 1979e12 / 2,  # H200 datasheet, SXM column
    "NVIDIA L40S": 362.05e12,  # L40S datasheet, which prints both figures
    "NVIDIA L4": 242e12 / 2,  # L4 datasheet
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """The peak of one device, or None where no datasheet figure is known."""
    return PEAK_BF16.get(device_name) if precision == "bf16" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The speed over the steps since the last reading."""

    tokens_per_s: float
    step_s: float
    mfu: float | None


class Meter:
    """Times training steps and nothing else: evaluation and saving lie between `pause` and `resume`."""

    def __init__(
        self, *, flops_per_token: int, peak: float | None, devices: int, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._flops_per_token = flops_per_token
        self._peak = peak * devices if peak else None
        self._now = now
        self._since = now()
        self._spent_s = 0.0  # since the last reading, before the last pause
        self._steps = self._tokens = 0
        self._total_s = 0.0
        self._total_tokens = 0

    def count(self, tokens: int) -> None:
        """One more step is done."""
        self._steps += 1
        self._tokens += tokens
        self._total_tokens += tokens

    def pause(self) -> None:
        self._spent_s += self._now() - self._since

    def resume(self) -> None:
        self._since = self._now()

    def read(self) -> Reading:
        """The speed since the last reading; the next one begins here."""
        self.pause()
        self.resume()
        tokens, steps, spent_s = self._tokens, self._steps, max(self._spent_s, 1e-9)
        self._total_s += spent_s
        self._steps = self._tokens = 0
        self._spent_s = 0.0
        speed = tokens / spent_s
        mfu = speed * self._flops_per_token / self._peak if self._peak else None
        return Reading(tokens_per_s=speed, step_s=spent_s / max(1, steps), mfu=mfu)

    @property
    def mean_tokens_per_s(self) -> float:
        """Over all readings of this run; 0 before the first."""
        unread = self._tokens
        return (self._total_tokens - unread) / self._total_s if self._total_s else 0.0
