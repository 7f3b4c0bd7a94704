"""One run of a probe: its device, what it has found so far, and the step it is at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, kw_only=True)
class Run:
    """What a probe is given. `results` is printed even if the probe dies half way, so fill it as you go."""

    devices: list[torch.device]  # one; p2p takes several
    whole: bool = False  # all of the memory instead of a share
    seconds: float | None = None  # None: as long as the probe thinks right
    results: dict[str, Any] = field(default_factory=dict)
    at: str = "start"
    # Ends the process after so many seconds, unless the returned function is called before.
    watch: Callable[[float], Callable[[], None]] | None = None

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def step(self, name: str) -> None:
        """Say what comes next: if it hangs or crashes, this is what is told."""
        self.at = name

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """A part that must not hang for long, because others wait for it."""
        release = self.watch(seconds) if self.watch is not None else lambda: None
        try:
            yield
        finally:
            release()

    def free_bytes(self) -> int:
        """Free memory of the device; on a CPU a size that every machine has."""
        return torch.cuda.mem_get_info(self.device)[0] if self.on_gpu else 64 << 20

    def l2_bytes(self) -> int:
        """The last cache before memory. What is to measure memory must be several times larger."""
        return int(getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0)) if self.on_gpu else 0


def wait(device: torch.device) -> None:
    """Until the device has done all it was given. An error of an earlier kernel is raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, Any]:
    """Who this device is: enough to prove that the right GPU was measured, and by which software."""
    identity: dict[str, Any] = {"type": device.type, "torch": str(torch.__version__), "cuda": torch.version.cuda}
    if device.type != "cuda":
        return {**identity, "name": "cpu", "uuid": None}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    uuid = getattr(properties, "uuid", None)
    return {
        **identity,
        "name": properties.name,
        # torch prints it without its prefix; nvidia-smi with.
        "uuid": None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}",
        "capability": [properties.major, properties.minor],
        "processors": properties.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
    }
