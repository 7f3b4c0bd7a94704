"""Out-of-memory explanation: what a rank held and what to change, in one line that the agent finds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from trainmaster.core.config.train import ModelConfig, TrainConfig
from trainmaster.core.errors import Fault
from trainmaster.models import family

if TYPE_CHECKING:
    from trainmaster.train.parallel.rank_info import RankInfo
    from trainmaster.train.parallel.shard import World

MARK = "out of memory:"  # how the line begins (agent/diagnose.py)
_GIB = 2**30
_TOKEN_BYTES = 16  # a token and the one that follows it
# torch's own words for a host that has none left: c10/core/impl/alloc_cpu.cpp
_HOST_WORDS = ("DefaultCPUAllocator: not enough memory", "DefaultCPUAllocator: can't allocate memory")


def explain_memory(error: BaseException, config: TrainConfig, world: World) -> str | None:
    """Explanation of an out-of-memory error; None for any other error."""
    import torch

    on_device = isinstance(error, torch.OutOfMemoryError)
    if not on_device and not isinstance(error, MemoryError) and not any(word in str(error) for word in _HOST_WORDS):
        return None
    rank_info = world.rank_info
    first_line = (str(error).splitlines() or [type(error).__name__])[0].split(". GPU ")[0]
    held = ""
    if on_device and world.device.type == "cuda":
        parts = hold(config, ranks_sharing(config, rank_info.world_size, rank_info.local_world_size))
        peak = torch.cuda.max_memory_allocated(world.device)
        total = torch.cuda.get_device_properties(world.device).total_memory
        known = "".join(f"{name} {size / _GIB:.1f} + " for name, size in parts.items())
        rest = max(0.0, peak - sum(parts.values()))
        held = (
            f" it held {peak / _GIB:.1f} of {total / _GIB:.1f} GiB: about {known}activations and buffers "
            f"{rest / _GIB:.1f} GiB;"
        )
    advice = ", or ".join(change(config, rank_info.world_size)) or "use a larger GPU, or more of them"
    where = f"rank {rank_info.rank} (node {rank_info.node_rank}, {world.device_name})"
    return f"{MARK} {where}: {first_line};{held} {advice}"


def find_absurd(
    config: TrainConfig, rank_info: RankInfo, *, device_bytes: float | None, host_bytes: float
) -> Fault | None:
    """A size that can never fit, before any memory is asked for: a host that swaps for an hour says nothing.

    `device_bytes` of the GPU; None: the ranks of a node train in its own memory. Only what is certain is refused.
    """
    on_host = device_bytes is None or config.parallel.cpu_offload
    place = host_bytes / rank_info.local_world_size if on_host or device_bytes is None else device_bytes
    has = f"and {'each rank of this host' if on_host else 'the GPU'} has {place / _GIB:,.1f} GiB"
    held = sum(hold(config, ranks_sharing(config, rank_info.world_size, rank_info.local_world_size)).values())
    if held > place:
        words = f"its weights, gradients and optimizer take {held / _GIB:,.1f} GiB on each rank, {has}"
        return Fault(path="model", message=f"{words}; use more ranks or a smaller model")
    rows = max(1, config.batch_sequences // rank_info.world_size)
    tokens = rows * config.sequence_tokens * _TOKEN_BYTES
    if tokens * rank_info.local_world_size > host_bytes:
        words = f"the tokens of a rank's {rows:,} sequences take {tokens / _GIB:,.1f} GiB"
        return Fault(path="batch_sequences", message=f"{words}, and the host has {host_bytes / _GIB:,.1f} GiB in all")
    at_once = min(config.micro_sequences or rows, rows)
    hidden = at_once * config.sequence_tokens * config.model.width * 2  # one layer's output in bf16
    if hidden > (device_bytes or place):
        path = "sequence_tokens" if at_once == 1 else "micro_sequences"
        words = f"one layer's output for {at_once:,} sequences takes {hidden / _GIB:,.1f} GiB"
        return Fault(path=path, message=f"{words}, and there are {(device_bytes or place) / _GIB:,.1f} GiB; lower it")
    return None


def hold(config: TrainConfig, sharing: int) -> dict[str, float]:
    """Bytes that one rank holds throughout training, by part."""
    each = 4 if config.master == "fp32" else 2
    count = _count_weights(config.model)
    weights = each * count / sharing
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights}


def _count_weights(model: ModelConfig) -> int:
    """Parameters of a model: blocks are alike, and a table of 100,000 of them would itself need gigabytes."""
    one, two = (sum(map(math.prod, family.weight_shapes(replace(model, layers=layers)).values())) for layers in (1, 2))
    return one + (model.layers - 1) * (two - one)


def ranks_sharing(config: TrainConfig, world_size: int, local_world_size: int) -> int:
    """Number of ranks that share one copy of the weights."""
    if config.parallel.sharding == "full":
        return world_size
    return config.parallel.shard_ranks or local_world_size


def change(config: TrainConfig, ranks: int) -> Iterator[str]:
    """Possible changes to this config, cheapest first."""
    parallel = config.parallel
    at_once = config.micro_sequences or max(1, config.batch_sequences // ranks)
    if at_once > 1:
        yield f"lower micro_sequences from {at_once} to {at_once // 2} (the batch stays the same)"
    if parallel.recompute == "none":
        yield "set parallel.recompute to ops or full (now none)"
    elif parallel.recompute != "full":
        yield f"set parallel.recompute to full (now {parallel.recompute})"
    if parallel.sharding != "full":
        yield "set parallel.sharding to full"
    if config.master == "fp32":
        yield "set master to bf16 (half the weights and optimizer)"
    if not parallel.cpu_offload:
        yield "set parallel.cpu_offload to true"
    if at_once == 1:
        yield f"lower sequence_tokens from {config.sequence_tokens}"
