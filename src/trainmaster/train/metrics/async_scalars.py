"""Scalars of a step on their way from the device to the host, read one step later.

Reading at once would block the host until the device is done, and leave the device idle until the host has started the
next step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmaster.train.watch.bad_steps import Limits


class PendingScalars:
    """Scalars of one device, copied to the host in the background."""

    def __init__(self, *numbers: Tensor) -> None:
        together = torch.stack([number.detach().float() for number in numbers])
        self._arrived: torch.cuda.Event | None = None
        self.made_at = time.perf_counter()
        if not together.is_cuda:
            self._host = together
            return
        self._host = torch.empty(len(numbers), pin_memory=True)  # a copy to other memory would be waited for
        self._host.copy_(together, non_blocking=True)
        self._arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._arrived.record()

    def read(self) -> list[float]:
        """Wait until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers

    @property
    def arrived(self) -> torch.cuda.Event | None:
        """Event of their arrival; None on a CPU, where they are there at once."""
        return self._arrived


class StepClock:
    """Completion times of steps, on the host's clock.

    The host reads a step's scalars after it has started the next one, and those of the last step without starting
    another: the moment of reading says nothing about the step. On a GPU the time between two steps is taken from the
    device. From step to step, because the elapsed time is a float32 of milliseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._at, self._event = time.perf_counter(), self._mark()

    def restart(self) -> None:
        """Begin anew after a pause, when no step is in flight."""
        self._at, self._event = time.perf_counter(), self._mark()

    def completed(self, scalars: PendingScalars) -> float:
        """When the step with these scalars was done; they must have been read."""
        if self._event is None or scalars.arrived is None:
            return scalars.made_at
        self._at += float(self._event.elapsed_time(scalars.arrived)) / 1e3
        self._event = scalars.arrived
        return self._at

    def _mark(self) -> torch.cuda.Event | None:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInFlight:
    """A step that runs on the device, or is done there and not accounted for."""

    step: int  # its number, from 1
    samples: range
    lr: float
    bounds: Limits  # that its loss and norm were held against
    numbers: PendingScalars  # loss, gradient norm, and 1 if it moved nothing
