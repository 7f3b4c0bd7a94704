"""Memory, speed, duration and cost of a run: arithmetic over a config and the facts of a GPU. No torch, no GPU.

plan_report   everything that `trainmaster plan` prints, as one mapping
shapes        every weight of a model, counted
layout        what one rank holds and computes
memory        the fullest moment of a step, tensor by tensor
speed         seconds of a step, kind of work by kind of work
calibration   measured figures for what cannot be derived
choose        the fastest setting that fits, and which GPUs would do

Published bandwidths between GPUs belong to the benchmarks (bench/bus_baselines.py); the caller passes them in.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.gpus import GpuModel
from trainmaster.estimate import memory as memories
from trainmaster.estimate import speed as speeds
from trainmaster.estimate.calibration import MemoryFacts, load
from trainmaster.estimate.layout import Setting, faults_on, setting_of
from trainmaster.estimate.memory import Memory
from trainmaster.estimate.speed import Speed

__all__ = ["Cluster", "Estimate", "estimate", "faults_on", "gpu_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The GPUs of a run. Without a GPU model only the memory is estimated."""

    gpu: GpuModel | None
    gpus: int
    gpus_per_node: int
    bus_gbps: float | None = None  # between all of them, as an all-reduce measures it; None: not published
    power_w: float | None = None  # limit of each card; None: the datasheet's

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One config on one cluster."""

    setting: Setting
    memory: Memory
    gpu_bytes: int | None  # bytes that CUDA can allocate on such a GPU
    speed: Speed | None
    speed_unknown: str | None  # why there is no speed

    @property
    def fits(self) -> bool | None:
        """None where the memory of the GPU is not known."""
        return self.memory.needed <= self.gpu_bytes if self.gpu_bytes is not None else None


def estimate(config: TrainConfig, cluster: Cluster) -> Estimate:
    """Memory and speed of this run there. Call `faults_on` first: it finds layouts that are not possible."""
    facts, gpu = load(), cluster.gpu
    size = gpu_bytes(gpu, facts.memory) if gpu is not None else None
    setting = setting_of(config, ranks=cluster.gpus, ranks_per_node=cluster.gpus_per_node, gpu_bytes=size)
    unknown = speeds.missing(gpu, setting) if gpu is not None else "no GPU model was named"
    speed = None
    if gpu is not None and unknown is None:
        speed = speeds.measure(
            config.model,
            setting,
            gpu,
            facts.speed,
            bus_gbps=cluster.bus_gbps,
            nodes=cluster.nodes,
            power_w=cluster.power_w,
        )
    return Estimate(
        setting=setting,
        memory=memories.measure(config.model, setting, facts.memory),
        gpu_bytes=size,
        speed=speed,
        speed_unknown=unknown,
    )


def gpu_bytes(gpu: GpuModel, facts: MemoryFacts | None = None) -> int:
    """Bytes CUDA can allocate. Vendors count in units of 2³⁰; GDDR boards use a sixteenth for error correction."""
    facts = facts or load().memory
    inline = gpu.hbm_gbps is not None and gpu.hbm_gbps < facts.inline_ecc_below_gbps
    share = facts.visible_share_inline_ecc if inline else facts.visible_share
    return round(gpu.memory_gb * 2**30 * share)
