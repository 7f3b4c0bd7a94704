"""Forward and backward passes of one step, over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainmaster.core.config.train import TrainConfig
from trainmaster.models import family
from trainmaster.models.decoder import Decoder
from trainmaster.models.loss import NOT_COUNTED, AddsLoss
from trainmaster.train.feed import Batch
from trainmaster.train.parallel.blocks import compile_blocks, recompute
from trainmaster.train.parallel.float8 import use_float8
from trainmaster.train.parallel.shard import Precision, World, shard

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(config: TrainConfig, world: World, precision: Precision) -> Decoder:
    """Build the model and shard it before it has memory: no rank ever holds more than its part."""
    parallel = config.parallel
    with torch.device("meta"):
        model = family.build(config.model, max_tokens=config.sequence_tokens)
    for weight in model.parameters():
        weight.data = weight.data.to(_DTYPES[config.master])  # not the rotary tables: they stay float32
    if parallel.float8:
        use_float8(model, world.device)
    recompute(model, parallel)
    compile_blocks(model, parallel, world.device)
    shard(model, world, config, precision)
    model.to_empty(device="cpu" if parallel.cpu_offload else world.device)
    model.init_weights(config.seed)
    model.rope_cos, model.rope_sin = model.rope_cos.to(world.device), model.rope_sin.to(world.device)
    return model


def forward_backward(
    model: Decoder,
    batches: Sequence[Batch],
    *,
    over_groups: Callable[[Tensor], None] | None = None,
    passes: int | None = None,
) -> Tensor:
    """Gradients of the mean loss over the counted tokens of all ranks' batches, added to what is there.

    Returns this rank's part of it: the mean over the ranks is the mean over the tokens. Nothing waits for the device.
    With replica groups `over_groups` sums over them in place, and `passes` are those of all of them: gradients and the
    part that is returned are this group's summands.
    """
    ranks = dist.get_world_size()
    counted = torch.stack([(batch.targets != NOT_COUNTED).sum() for batch in batches]).sum()
    if ranks > 1:
        dist.all_reduce(counted)
    if over_groups is not None:
        over_groups(counted)
    # FSDP's gradients are means over the ranks.
    share = ranks / counted.clamp(min=1)
    for module in model.modules():
        if isinstance(module, AddsLoss):
            module.loss_scale = 1 / (passes or len(batches))
    total = torch.zeros((), device=batches[0].tokens.device)
    for batch in batches:
        _reduce_now(model, last=batch is batches[-1])
        loss = model(batch.tokens, targets=batch.targets, documents=batch.documents) * share
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def sum_of_losses(model: Decoder, batch: Batch) -> Tensor:
    """Sum of the losses of all counted tokens."""
    total: Tensor = model(batch.tokens, targets=batch.targets, documents=batch.documents)
    return total


def _reduce_now(model: Decoder, *, last: bool) -> None:
    """Reduce gradients over the ranks after the last micro-batch only."""
    if isinstance(model, FSDPModule):
        if model.reduce_once:
            model.set_requires_gradient_sync(last)
        else:
            model.set_requires_all_reduce(last)
