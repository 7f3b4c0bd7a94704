"""Physical limit of the links inside a node, and the share of it that a healthy all_reduce reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainmaster.core.gpus import find_gpu

Kind = Literal["network", "nvlink", "pcie"]
# Shares of the link's bandwidth: (fails below, warns below). Ring all_reduce reaches 0.8 to 1.2 of the network (2×p4de:
# 78 of 50 GB/s, 4×p5en: 365 of 400), 0.8 of NVLink (8×A100: 235 of 300), and without peer access a tenth to a third of
# PCIe, because each byte passes host memory twice.
SHARES: Mapping[Kind, tuple[float, float]] = {"network": (0.25, 0.5), "nvlink": (0.25, 0.5), "pcie": (0.08, 0.15)}
LATENCY_BOUND = 16 << 20  # bytes: smaller messages show latency, not bandwidth
_PCIE_GBPS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one lane, one direction
_FEWEST_LANES = 8  # of a server's slot; for models whose width no source states


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slowest link of a run: GB/s in one direction, and its source."""

    kind: Kind
    gbps: float
    words: str
    gpus: int = 1  # that share it: in all_to_all and sendrecv each rank counts its own bytes


def find_node_link(gpu: str | None) -> Link | None:
    """The link that joins GPUs of this model inside a node; None where the model is not known."""
    model = find_gpu(gpu) if gpu else None
    if model is None:
        return None
    if model.nvlinks:
        # NVLink 2 to 4 have 25 GB/s a link and direction, NVLink 5 has 50.
        each = 50.0 if model.name.startswith(("B", "GB")) else 25.0
        return Link(kind="nvlink", gbps=model.nvlinks * each, words=f"{model.nvlinks} NVLinks of {model.name}")
    if model.pcie_gen in _PCIE_GBPS:
        lanes = model.pcie_width or _FEWEST_LANES
        rate = _PCIE_GBPS[model.pcie_gen] * lanes
        return Link(kind="pcie", gbps=rate, words=f"PCIe {model.pcie_gen} x{lanes} of {model.name}")
    return None
