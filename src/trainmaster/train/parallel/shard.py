"""Process group, and sharding of a single-device model over it.

FSDP on any number of ranks. A lone rank that keeps its weights in the type it computes in has nothing to gather and
nothing to cast: there FSDP would only copy, which costs 6% of the speed on an H200, and is left out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from trainmaster.core.config.parallel import ParallelConfig
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import UsageError
from trainmaster.models.decoder import Decoder, count_parameters
from trainmaster.train.parallel import rendezvous
from trainmaster.train.parallel.rank_info import RankInfo

Precision = Literal["fp32", "bf16"]
_LEFT = "trainmaster/left"  # key of the number of ranks that need the store no more
_LEAVE_S = 60.0  # longest wait for them


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank and the device it computes on."""

    rank_info: RankInfo
    device: torch.device
    quorum: Path | None = None  # folder of the replica groups (node/quorum.py); None: there are none

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


def pick_device(word: str, rank_info: RankInfo) -> torch.device:
    """Device of this rank. A requested GPU that is missing is refused, never replaced by the CPU."""
    count = torch.cuda.device_count()
    if word == "cpu" or (word == "auto" and count == 0):
        return torch.device("cpu")
    if rank_info.groups > 1 and rank_info.world_size <= count:
        # A group's ranks have a GPU each; groups share one where there are not enough.
        return torch.device("cuda", rank_info.number % count)
    if rank_info.local_rank >= count:
        raise UsageError(
            f"device: rank {rank_info.rank} needs GPU {rank_info.local_rank}, and this node shows {count}; "
            "start at most one process per GPU, or set device: cpu"
        )
    return torch.device("cuda", rank_info.local_rank)


def memory_of(device: torch.device) -> float | None:
    """Bytes of memory of a GPU; None for the CPU."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def memory_of_host() -> float:
    """Bytes of memory and swap of this machine."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    return sum(1024.0 * int(lines[name].split()[0]) for name in ("MemTotal", "SwapTotal"))


def pick_precision(config: TrainConfig, device: torch.device) -> Precision:
    """Type of the matrix products; `config.master` is the type of weights and optimizer states."""
    if config.precision == "auto":
        return "bf16" if device.type == "cuda" or config.master == "bf16" else "fp32"
    return config.precision


def use_one_order() -> None:
    """Only kernels that add in one order, in torch, cuBLAS and the compiler. Before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.backends.cudnn.benchmark = False
    with contextlib.suppress(ImportError, AttributeError):  # the compiler must not choose by time how to add
        from torch._inductor import config

        config.deterministic = True


def use_device(device: torch.device, rank_info: RankInfo) -> None:
    """Open the device for this process: the context of a GPU, or threads on this rank's share of the cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # One rank's threads on another rank's cores slow both down several times over.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // rank_info.local_world_size))


def join(rank_info: RankInfo, device: torch.device, *, timeout_s: float) -> World:
    """Join the process group. No collective waits longer than `timeout_s`: a dead peer ends the run."""
    use_device(device, rank_info)
    # Connections are made when two ranks first talk. A full mesh for each of five groups would need more than the usual
    # 1,024 descriptors near 245 ranks.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    _allow_descriptors()
    if rank_info.nodes == 1:
        # Gloo otherwise takes the interface of the host's own name, which need not exist or may be filtered.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        # Gloo stays beside NCCL for what lives on the CPU: stop flags, file lists, checkpoint plans.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=rendezvous.open_store(rank_info, timeout_s=timeout_s),
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timedelta(seconds=timeout_s),
        # With a device NCCL connects at once. A lone rank has nobody to connect to, and need not wait 0.3 s for it.
        device_id=device if device.type == "cuda" and rank_info.world_size > 1 else None,
    )
    return World(rank_info=rank_info, device=device)


def limit_collectives(timeout_s: float) -> None:
    """Change the limit of the training collectives, once the slow first step is done."""
    for group in set(dist.distributed_c10d._world.pg_map):
        # Groups of the checkpoints have limits of their own.
        if group.group_desc in ("default_pg", "undefined") or group.group_desc.startswith("mesh_"):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def _allow_descriptors() -> None:
    """Raise this process's limit of open files as far as the system lets it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def leave() -> None:
    """Leave the process group after all work is done. Rank 0, which may hold the store, leaves last."""
    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.barrier()
    # A barrier that is over here may still make its connections elsewhere, and needs the store for them.
    until = time.monotonic() + _LEAVE_S
    # Under torchrun its agent keeps the store: where that was killed, nobody waits at it any more.
    with contextlib.suppress(dist.DistError):
        store.add(_LEFT, 1)
        while rank == 0 and store.add(_LEFT, 0) < world and time.monotonic() < until:
            time.sleep(0.01)
    dist.destroy_process_group()


def shard(model: Decoder, world: World, config: TrainConfig, precision: Precision) -> None:
    """Shard the weights over the ranks: each block, then the rest (embedding, last norm, head)."""
    parallel = config.parallel
    if world.rank_info.world_size == 1 and config.master == precision and not parallel.cpu_offload:
        return
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        # Gradients are summed in float32: bfloat16 sums over many ranks lose small ones. Inputs are left alone: tokens
        # are whole numbers, and the rotary tables must stay float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": build_mesh(world, parallel), "mp_policy": policy}
    if parallel.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.reduce_once = parallel.reduce == "last" or (parallel.reduce == "auto" and _gradients_fit(model, world))


def build_mesh(world: World, parallel: ParallelConfig) -> DeviceMesh:
    """Device mesh: one dimension (full sharding), or copies × shards (hybrid sharding)."""
    ranks = world.rank_info.world_size
    if parallel.sharding == "full":
        return init_device_mesh(world.device.type, (ranks,))
    each = parallel.shard_ranks or world.rank_info.local_world_size
    if ranks % each:
        raise UsageError(
            f"parallel.sharding: hybrid needs as many ranks on every node; {ranks} are not a multiple of {each}"
        )
    return init_device_mesh(world.device.type, (ranks // each, each), mesh_dim_names=("copy", "shard"))


def _gradients_fit(model: Decoder, world: World) -> bool:
    """Whether whole gradients in float32 are a small thing for this device; until they are summed every rank holds all
    of them. On a CPU they are."""
    if world.device.type != "cuda":
        return True
    memory_bytes = torch.cuda.get_device_properties(world.device).total_memory
    return 4 * count_parameters(model) <= memory_bytes / 10
