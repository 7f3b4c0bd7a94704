"""Published runs of other trainers on several GPUs, and what the plan gives for the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.gpus import GpuModel, gpus
from trainmaster.core.schema import build
from trainmaster.estimate import Cluster, calibration, estimate

_PER_NODE = 8


class Bus(Protocol):
    """A published bandwidth between GPUs."""

    @property
    def gbps(self) -> float: ...
    @property
    def source(self) -> str: ...


class FindBus(Protocol):
    """The published bandwidth between GPUs of a model on that number of nodes; None where there is none."""

    def __call__(self, gpu: GpuModel, *, nodes: int) -> Bus | None: ...


def ratio(row: Mapping[str, Any], find_bus: FindBus) -> float:
    """Planned over published tokens/s of one row."""
    card = gpus()[row["gpu"]]
    gpu = replace(card, hbm_gbps=row.get("hbm_gbps", card.hbm_gbps))
    config = build(
        TrainConfig,
        {
            "model": {"preset": row["preset"]},
            "batch_sequences": row["rows"] * row["gpus"],
            "sequence_tokens": 8192,
            "eval_sequences": 0,
            "parallel": {
                "recompute": row["recompute"],
                "float8": row.get("float8", False),
                "compile": row.get("compile", "auto"),
            },
        },
    )
    bus = find_bus(card, nodes=row["gpus"] // _PER_NODE)
    cluster = Cluster(
        gpu=gpu,
        gpus=row["gpus"],
        gpus_per_node=_PER_NODE,
        bus_gbps=bus.gbps if bus is not None else None,
        power_w=row.get("power_w"),
    )
    speed = estimate(config, cluster).speed
    assert speed is not None, f"{row['source']}: no speed"
    published: float = row["gpus"] * row["tokens_per_s_per_gpu"]
    return speed.tokens_per_s / published


def span(find_bus: FindBus) -> tuple[float, float]:
    """The least and the greatest ratio of all rows."""
    ratios = [ratio(row, find_bus) for row in calibration.load().published]
    return min(ratios), max(ratios)
