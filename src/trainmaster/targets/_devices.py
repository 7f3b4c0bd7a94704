"""Devices of machines for our own queue, and those that an attempt was given, in its handle."""

from __future__ import annotations

from trainmaster.core.attempt import Handle
from trainmaster.queueing.state import Device
from trainmaster.remote.devices import Gpu

KEY = "devices"  # of a handle: machine → devices


def to_device(machine: str, gpu: Gpu) -> Device:
    """A GPU of a machine, with its users."""
    return Device(
        id=gpu.uuid, machine=machine, model=gpu.model, used="; ".join(text for _, text in gpu.users) or None,
        attempts=tuple(sorted({attempt for attempt, _ in gpu.users})), parent=gpu.parent,
    )  # fmt: skip


def find_gpus(handle: Handle, machine: str) -> tuple[str, ...]:
    """GPUs of a machine that an attempt was given; none where it takes slots, or the queue gives out nothing there."""
    names = handle.get(KEY, {}).get(machine, ())
    return tuple(name for name in names if name.startswith(("GPU-", "MIG-")))
