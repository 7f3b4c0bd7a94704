"""GPU models (data/gpus.toml): facts with their sources, found by the product name of the driver."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any

from trainmaster.core.compat import read_toml

UNVERIFIED = "unverified"  # the source of a fact that no document states


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # one object per model
class GpuModel:
    """Facts of a GPU model. None: no source states it."""

    name: str
    names: tuple[str, ...]
    memory_gb: float
    nvlinks: int | None = None
    nvlink_gbps: float | None = None  # one link, one way
    pcie_gen: int | None = None
    pcie_width: int | None = None
    power_w: float | None = None
    bf16_tflops: float | None = None
    tf32_tflops: float | None = None
    fp8_tflops: float | None = None
    bf16_measured_tflops: float | None = None
    fp8_measured_tflops: float | None = None
    hbm_gbps: float | None = None
    hbm_measured_gbps: float | None = None
    h2d_gbps: float | None = None
    d2h_gbps: float | None = None
    cuda_min: str | None = None
    generation: str | None = None  # as nvidia-smi writes it: Volta, Turing, Ampere, Ada Lovelace, Hopper, Blackwell
    memory_kind: str | None = None  # HBM2, HBM2e, HBM3, HBM3e, GDDR6, GDDR7
    fabric: bool | None = None  # sold only behind NVSwitches
    c2c: bool | None = None  # joined to its CPU by NVLink-C2C; what it shows of PCIe is no measure
    sources: Mapping[str, str] = field(default_factory=dict)  # of each field above

    def is_verified(self, name: str) -> bool:
        """Whether a source states this fact. A GPU that differs from an unverified one is a warning, no failure."""
        return self.sources.get(name) != UNVERIFIED


def find_gpu(name: str) -> GpuModel | None:
    """GPU model by its short name, or by the product name of nvidia-smi."""
    wanted = _plain(name)
    return next((model for key, model in gpus().items() if wanted == _plain(key)), None) or of_gpu(name)


def of_gpu(product: str | None) -> GpuModel | None:
    """GPU model by whole product name: H200 is not GH200, and A10 is not A100."""
    wanted = _plain(product or "")
    return next((model for model in gpus().values() if wanted in map(_plain, model.names)), None)


@functools.cache
def gpus() -> Mapping[str, GpuModel]:
    """Every GPU model of data/gpus.toml."""
    text = (resources.files("trainmaster.core") / "data" / "gpus.toml").read_text(encoding="utf-8")
    document = read_toml(text)
    return {name: _gpu_model(name, row, document["source"]) for name, row in document["gpu"].items()}


@functools.cache
def unsupported() -> Mapping[str, str]:
    """Models of other vendors that users may name, with the reason why no check can judge them."""
    text = (resources.files("trainmaster.core") / "data" / "gpus.toml").read_text(encoding="utf-8")
    return {_plain(name): why for name, why in read_toml(text)["unsupported"].items()}


def why_unsupported(name: str) -> str | None:
    """Reason why a named model is not supported; None if it is not known as such."""
    return unsupported().get(_plain(name).removeprefix("amd ").removeprefix("instinct "))


def _gpu_model(name: str, row: Mapping[str, Any], sources: Mapping[str, str]) -> GpuModel:
    facts = {key: fact for key, fact in row.items() if key != "names"}
    unknown = set(facts) - {item.name for item in fields(GpuModel)}
    assert not unknown, f"gpus.toml: {name} has {unknown}"
    return GpuModel(
        name=name,
        names=tuple(row["names"]),
        sources={key: sources[fact["source"]] for key, fact in facts.items()},
        **{key: fact["value"] for key, fact in facts.items()},
    )


def _plain(name: str) -> str:
    """Normal form of a product name: older drivers omit NVIDIA or write Tesla."""
    words = re.split(r"[\s_]+", name.strip().lower())
    return " ".join(word for word in words if word not in ("nvidia", "tesla"))
