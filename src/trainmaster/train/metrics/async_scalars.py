"""Scalars of a step on their way from the device to the host, read one step later.

Reading at once would block the host until the device is done, and leave the device idle until the host has started the
next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainmaster.train.watch.bad_steps import Limits


class PendingScalars:
    """Scalars of one device, copied to the host in the background."""

    def __init__(self, *numbers: Tensor) -> None:
        together = torch.stack([number.detach().float() for number in numbers])
        self._arrived: torch.cuda.Event | None = None
        if not together.is_cuda:
            self._host = together
            return
        self._host = torch.empty(len(numbers), pin_memory=True)  # a copy to other memory would be waited for
        self._host.copy_(together, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def read(self) -> list[float]:
        """Wait until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInFlight:
    """A step that runs on the device, or is done there and not accounted for."""

    step: int  # its number, from 1
    samples: range
    lr: float
    bounds: Limits  # that its loss and norm were held against
    numbers: PendingScalars  # loss, gradient norm, and 1 if it moved nothing
