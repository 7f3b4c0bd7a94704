"""Published bus bandwidth between the GPUs of a cluster: the baseline of that GPU on the nearest number of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainmaster.bench import limits
from trainmaster.core.gpus import GpuModel

_LEAST_BYTES = 1 << 30  # smaller messages measure latency


@dataclass(frozen=True, slots=True, kw_only=True)
class BusBaseline:
    """One published figure."""

    gbps: float
    source: str


def find(gpu: GpuModel, *, nodes: int, fabric: str | None = None) -> BusBaseline | None:
    """All-reduce bandwidth over 8 GPUs a node; of several nodes, at the nearest number of them, the slowest fabric.

    None where none is published: PCIe boards, and GPUs that are sold in pairs.
    """
    model = limits.gpu_model(gpu.names[0])
    fit = [
        base
        for base in limits.load()
        if base.key.gpu == model
        and base.kind == "measured"
        and base.key.collective == "all_reduce"
        and base.key.algorithm in ("default", "ring")
        and (base.size_bytes or 0) >= _LEAST_BYTES
        and (base.key.nodes == 1) == (nodes == 1)
        and fabric in (None, base.key.fabric)
    ]
    if not fit:
        return None
    near = min(abs(math.log(base.key.nodes / nodes)) for base in fit)
    base = min(
        (base for base in fit if abs(math.log(base.key.nodes / nodes)) == near), key=lambda base: base.busbw_gbps
    )
    size = limits.render_size(base.size_bytes or 0)
    return BusBaseline(gbps=base.busbw_gbps, source=f"{base.key}, {size}: {base.busbw_gbps:g} GB/s ({base.source})")
