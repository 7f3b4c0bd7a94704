"""Measured figures for what cannot be derived (data/estimate.toml): shares of a peak that real kernels reach."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Memory that no tensor of ours explains."""

    context_bytes: int
    nccl_bytes: int
    workspace_bytes: int
    fragmentation_share: float
    visible_share: float  # of the memory a vendor states, read as GiB: what CUDA hands out
    visible_share_inline_ecc: float  # of memory without room for ECC of its own
    inline_ecc_below_gbps: float  # GDDR6 boards: all that are slower than this


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFacts:
    """How much of a GPU's peaks a training step reaches. Shares are of the datasheet's figures."""

    matrix_share: float
    float8_share: float
    memory_share: float
    attention_forward_share: Mapping[int, float]  # by the size of a head
    attention_backward_share: Mapping[int, float]
    eager_memory_factor: float  # bytes that unfused code moves over those of fused code
    block_s: float  # the host's time for one block, forward and backward
    gather_block_s: float  # of FSDP's own work around one block
    step_s: float  # of each step: waiting for the loss, the norm, the next batch
    gather_share: float  # of the published bus bandwidth of an all-reduce
    overlap_share: float  # of the computing during which communication is hidden
    power_exponent: float  # rate of products under a power limit: (limit over the datasheet's power) to this
    scale_share: float  # of a step, for each doubling of the nodes: latency of gathers, the slowest of many


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All of it, with where it comes from."""

    memory: MemoryFacts
    speed: SpeedFacts
    measured_on: str  # the GPU of the measurements
    save_gbps: float  # of one node: a save with hashes, synced
    save_hold_s_per_gb: float  # that training loses to a save in the background, by the GB of one GPU
    restart_s: float  # from a failure to the next step
    sources: Mapping[str, str]
    published: tuple[Mapping[str, Any], ...]  # runs of other trainers on several GPUs, each with its source


@functools.cache
def load() -> Calibration:
    """The calibration that ships."""
    text = (resources.files("trainmaster.estimate") / "data" / "estimate.toml").read_text(encoding="utf-8")
    return parse(tomllib.loads(text))


def parse(document: Mapping[str, Any]) -> Calibration:
    speed = dict(document["speed"])
    for name in ("attention_forward_share", "attention_backward_share"):
        speed[name] = {int(size): share for size, share in speed[name].items()}
    return Calibration(
        memory=MemoryFacts(**document["memory"]),
        speed=SpeedFacts(**speed),
        measured_on=document["measured_on"],
        save_gbps=document["save_gbps"],
        save_hold_s_per_gb=document["save_hold_s_per_gb"],
        restart_s=document["restart_s"],
        sources=document["source"],
        published=tuple(document["published"]),
    )
