"""Join the ranks into one group, and spread a single-device model over them.

FSDP on any number of ranks, one included: a run on a laptop takes the same path as one on a cluster.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainmaster.core.errors import UsageError
from trainmaster.core.train_config import TrainConfig
from trainmaster.models.llama import Llama
from trainmaster.train.place import Place

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank's place among all of them, and the device it computes on."""

    place: Place
    device: torch.device
    mesh: DeviceMesh

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


def pick_device(word: str, place: Place) -> torch.device:
    """The device of this rank; a GPU that was asked for and is not there is refused, never replaced by the CPU."""
    count = torch.cuda.device_count()
    if word == "cpu" or (word == "auto" and count == 0):
        return torch.device("cpu")
    if place.local_rank >= count:
        raise UsageError(
            f"device: rank {place.rank} needs GPU {place.local_rank}, and this node shows {count}; "
            "start at most one process per GPU, or set device: cpu"
        )
    return torch.device("cuda", place.local_rank)


def pick_precision(config: TrainConfig, device: torch.device) -> Precision:
    """What matrices are computed in. Weights and optimizer are float32 in any case."""
    if config.precision == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return config.precision


def join(place: Place, device: torch.device, *, timeout_s: float) -> World:
    """Wait for the other place. No collective waits longer than `timeout_s`: a dead peer ends the run."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # One rank's threads on another rank's cores slow both down several times over.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))
    if place.nodes == 1:
        # Gloo otherwise takes the interface of the host's own name, which need not exist or may be filtered.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: Store | None = None
    if place.master is None or place.world_size == 1:
        # A lone rank needs no port, and two lone runs on one machine cannot meet by mistake.
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        # Through the environment, not by a store of our own: under torchrun the agent already holds this port.
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.master[0], str(place.master[1])
    dist.init_process_group(
        # Gloo stays beside NCCL for what lives on the CPU: stop flags, file lists, checkpoint plans.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return World(place=place, device=device, mesh=init_device_mesh(device.type, (place.world_size,)))


def leave() -> None:
    """Part from the other ranks after all work is done."""
    dist.barrier()  # rank 0 holds the store: if it left first, the others would see it as a failure
    dist.destroy_process_group()


def shard(model: Llama, world: World, precision: Precision) -> None:
    """Spread the weights over all ranks: each block by itself, then what is left (embedding, last norm, head)."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        # Gradients are summed in float32: bfloat16 sums over many ranks lose small ones. Inputs are left alone: tokens
        # are whole numbers, and the rotary tables must stay float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
