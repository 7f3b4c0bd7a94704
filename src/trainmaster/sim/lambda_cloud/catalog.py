"""Instance types, regions and images that the simulated cloud offers (data/catalog.toml)."""

from __future__ import annotations

import functools
import tomllib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trainmaster.core.gpus import GpuModel, gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """One type: `gpu` is None where it has no GPU."""

    name: str
    gpu: GpuModel | None
    gpus: int
    cents_per_hour: int
    vcpus: int
    memory_gib: int
    storage_gib: int
    regions: tuple[str, ...]

    def body(self) -> dict[str, Any]:
        """The type as the API shows it."""
        gpu = f"{self.gpu.names[0]} ({self.gpu.memory_gb:g} GB)" if self.gpu else "N/A"
        return {
            "name": self.name,
            "description": f"{self.gpus}x {gpu}" if self.gpu else f"{self.vcpus} vCPUs",
            "gpu_description": gpu,
            "price_cents_per_hour": self.cents_per_hour,
            "specs": {
                "vcpus": self.vcpus,
                "memory_gib": self.memory_gib,
                "storage_gib": self.storage_gib,
                "gpus": self.gpus,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Everything on offer."""

    types: Mapping[str, InstanceType]
    regions: Mapping[str, str]
    images: tuple[Mapping[str, Any], ...]

    def region(self, name: str) -> dict[str, str]:
        """A region as the API shows it."""
        return {"name": name, "description": self.regions[name]}


@functools.cache
def load_catalog() -> Catalog:
    """The catalog that ships with the package."""
    text = (resources.files("trainmaster.sim.lambda_cloud") / "data" / "catalog.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    regions: Mapping[str, str] = document["region"]
    return Catalog(
        types={name: _type(name, row) for name, row in document["type"].items()},
        regions=regions,
        images=tuple(
            _image(family, row, region, place)
            for family, row in document["image"].items()
            for region, place in regions.items()
        ),
    )


def _type(name: str, row: Mapping[str, Any]) -> InstanceType:
    return InstanceType(
        name=name,
        gpu=gpus()[row["gpu"]] if "gpu" in row else None,
        gpus=row["gpus"],
        cents_per_hour=row["cents"],
        vcpus=row["vcpus"],
        memory_gib=row["memory_gib"],
        storage_gib=row["storage_gib"],
        regions=tuple(row["regions"]),
    )


def _image(family: str, row: Mapping[str, str], region: str, description: str) -> Mapping[str, Any]:
    return {
        "id": uuid.uuid5(uuid.NAMESPACE_URL, f"{family} {region}").hex,
        "created_time": "2026-01-01T00:00:00+00:00",
        "updated_time": "2026-01-01T00:00:00+00:00",
        "name": row["name"],
        "description": "Simulated",
        "family": family,
        "version": row["version"],
        "architecture": "x86_64",
        "region": {"name": region, "description": description},
    }
