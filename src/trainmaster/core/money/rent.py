"""`rent:` of a job spec: which machine to rent, where the target rents machines."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.core.schema import field

_WORD = r"[A-Za-z0-9][A-Za-z0-9 ._:-]{0,127}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rent:
    """Requirements for each rented machine. The cheapest offer that meets all of them is taken."""

    gpus: int | None = field(
        default=None, ge=0, le=1024, doc="GPUs of each machine, at least", default_text="resources.processes_per_node"
    )
    gpu: str | None = field(default=None, pattern=_WORD, example="H100", doc="GPU model, as the provider describes it")
    gpu_memory_gib: float | None = field(default=None, gt=0, doc="memory of each GPU, at least")
    memory_gib: float | None = field(default=None, gt=0, doc="main memory of each machine, at least")
    types: tuple[str, ...] = field(default=(), doc="instance types to choose from; not stated: all")
    regions: tuple[str, ...] = field(default=(), doc="regions to choose from; not stated: all")
    max_price_per_hour: float | None = field(
        default=None, gt=0, le=1_000_000, doc="dollars an hour for one machine, at most"
    )
    file_systems: tuple[str, ...] = field(
        default=(), doc="file systems of the provider to attach; only regions that hold them are chosen"
    )
    image: str | None = field(default=None, pattern=_WORD, example="lambda-stack-24-04", doc="image family")
    boot_minutes: float = field(
        default=40.0, gt=0, le=1440, doc="longest time from launch until SSH answers; 8 H100 take over 20 minutes"
    )
    collect_minutes: float = field(
        default=60.0,
        gt=0,
        le=1440,
        doc="longest time that a machine is kept while its outputs cannot be stored; what is missing is then named",
    )
    wait_minutes: float | None = field(
        default=60.0,
        ge=0,
        most=525_600,
        doc="longest wait for capacity, then the attempt ends as no_capacity; null: for ever",
    )
