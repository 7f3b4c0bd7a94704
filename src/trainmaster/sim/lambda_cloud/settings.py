"""Settings of the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Durations are simulated seconds; `time_factor` of them pass in one real second. Port 0 takes a free one."""

    folder: Path
    port: int = 0
    ssh_port: int = 0
    seed: int = 0
    faults: Mapping[str, float] = field(default_factory=dict)
    boot_s: float = 60.0
    terminate_s: float = 10.0
    listed_s: float = 300.0  # how long an ended instance stays in the listing
    time_factor: float = 1.0
    api_key_file: Path | None = None
    cache: Path | None = None  # shared by all instances, as of an image with the node half; None: each has its own
    capacity: int = 64  # instances of one type in one region
    quota: int | None = None  # instances of the account
