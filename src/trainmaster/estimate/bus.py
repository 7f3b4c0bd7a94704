"""The bandwidth between the GPUs of a plan: what others have published for that GPU and about that many nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.core.gpus import GpuModel

_LEAST_BYTES = 1 << 30  # smaller messages measure latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """One published figure."""

    gbps: float
    source: str


def find(gpu: GpuModel, *, nodes: int, fabric: str | None = None) -> Bus | None:
    """An all-reduce over 8 GPUs a node; of several nodes, on the number of them that is nearest, the slowest fabric.

    None where nobody has published one: PCIe boards, and GPUs that are sold in twos.
    """
    from trainmaster.bench import limits

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
    return Bus(gbps=base.busbw_gbps, source=f"{base.key}, {size}: {base.busbw_gbps:g} GB/s ({base.source})")
