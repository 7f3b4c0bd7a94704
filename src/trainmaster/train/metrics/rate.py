"""Rates: tokens per second, model FLOPs utilisation, shares of a step's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.gpus import of_gpu

if TYPE_CHECKING:
    import torch

_SIZE = 8192  # rows and columns of the burst's matrices: large enough to fill any GPU of today
_PRODUCTS = 10  # timed together, 14 ms of an H200
_ROUNDS = 5  # the best counts: the first ones are below the clock's top


def peak_flops(device_name: str, precision: str) -> float | None:
    """Datasheet peak of one device; None if unknown: a guessed peak would give a guessed MFU."""
    model = of_gpu(device_name) if precision == "bf16" else None
    return model.bf16_tflops * 1e12 if model is not None and model.bf16_tflops is not None else None


def measure_peak(device: torch.device, precision: str) -> float | None:
    """Measured peak of this GPU in bfloat16 matrix products; None on a CPU.

    A tenth of a second, before the model takes its memory.
    """
    import torch

    if device.type != "cuda" or precision != "bf16":
        return None
    left, right = (torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    product, best_s = left @ right, float("inf")
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=product)
        end.record()
        end.synchronize()
        best_s = min(best_s, begin.elapsed_time(end) / 1e3)
    del left, right, product
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return _PRODUCTS * 2 * _SIZE**3 / best_s


def thread_busy_s() -> float | None:
    """CPU time of this thread, including the time it was runnable: all but the time it waited.

    The kernel counts both in nanoseconds (Documentation/scheduler/sched-stats.rst). A thread that spins counts as busy,
    so it says nothing of one that waits for a GPU.
    """
    try:
        ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(ran) + int(queued)) / 1e9
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Rates over the steps since the last reading. Shares are of the time; None if not measurable."""

    tokens_per_s: float
    step_s: float
    mfu: float | None = None  # against the datasheet
    mfu_measured: float | None = None  # against what these GPUs reached in a burst at the start
    data_s: float = 0.0  # of a step, waiting for samples
    compute_s: float | None = None
    data_share: float = 0.0
    compute_share: float | None = None
    comm_share: float | None = None  # waiting for other ranks, and moving what they exchange


class Meter:
    """Timer of training steps only: evaluation and saving lie between `pause` and `resume`."""

    def __init__(
        self,
        *,
        flops_per_token: int,
        peak: float | None,
        devices: int,
        measured: float | None = None,  # of all devices together
        busy: Callable[[], float | None] = lambda: None,  # thread_busy_s where the thread itself computes
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flops_per_token = flops_per_token
        self._peak = peak * devices if peak else None
        self._measured = measured
        self._devices = devices
        self._now, self._busy = now, busy
        self._since, self._busy_since = now(), busy()
        self._done_at = self._since  # when the last counted step was done
        self._spent_s = 0.0  # since the last reading, before the last pause
        self._busy_s = 0.0
        self._data_s = self._data_so_far_s = 0.0
        self._steps = self._tokens = 0
        self._total_s = 0.0
        self._total_tokens = 0

    def count(self, tokens: int, *, at: float | None = None) -> None:
        """Count one step that was done at this time; None: now."""
        self._done_at = self._now() if at is None else max(at, self._since)
        self._steps += 1
        self._tokens += tokens
        self._total_tokens += tokens

    def pause(self) -> None:
        self._spent_s += self._now() - self._since
        self._busy_s += _less(self._busy(), self._busy_since)

    def resume(self) -> None:
        self._since, self._busy_since = self._now(), self._busy()
        self._done_at = self._since

    def wait_for_data(self, so_far_s: float) -> None:
        """Add the time that this rank has waited for its own samples; `so_far_s` is the total since the start."""
        self._data_s += so_far_s - self._data_so_far_s
        self._data_so_far_s = so_far_s

    def read(self) -> Reading:
        """Rates since the last reading, up to the end of the last counted step; the next reading begins there."""
        self._spent_s += self._done_at - self._since
        self._busy_s += _less(self._busy(), self._busy_since)
        self._since, self._busy_since = self._done_at, self._busy()
        tokens, steps, spent_s = self._tokens, max(1, self._steps), max(self._spent_s, 1e-9)
        data_s, busy_s = min(self._data_s, spent_s), self._busy_s
        self._total_s += spent_s
        self._steps = self._tokens = 0
        self._spent_s = self._busy_s = self._data_s = 0.0
        speed = tokens / spent_s
        compute_s = self._compute_s(spent_s, data_s, busy_s)
        return Reading(
            tokens_per_s=speed,
            step_s=spent_s / steps,
            mfu=speed * self._flops_per_token / self._peak if self._peak else None,
            mfu_measured=speed * self._flops_per_token / self._measured if self._measured else None,
            data_s=data_s / steps,
            compute_s=None if compute_s is None else compute_s / steps,
            data_share=data_s / spent_s,
            compute_share=None if compute_s is None else compute_s / spent_s,
            comm_share=None if compute_s is None else max(0.0, spent_s - data_s - compute_s) / spent_s,
        )

    def _compute_s(self, spent_s: float, data_s: float, busy_s: float) -> float | None:
        if self._devices == 1:
            return spent_s - data_s  # no other rank to wait for
        if self._busy_since is None:
            return None
        return min(max(0.0, busy_s), spent_s - data_s)

    @property
    def mean_tokens_per_s(self) -> float:
        """Over all readings of this run; 0 before the first."""
        unread = self._tokens
        return (self._total_tokens - unread) / self._total_s if self._total_s else 0.0


def _less(after: float | None, before: float | None) -> float:
    return after - before if after is not None and before is not None else 0.0
