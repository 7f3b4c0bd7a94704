"""Loss on held-out samples. Reads its own stream: the training cursor does not move."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from trainmaster.core.config.train import TrainConfig
from trainmaster.datasets import NOT_COUNTED
from trainmaster.models.decoder import Decoder
from trainmaster.train.compute import sum_of_losses
from trainmaster.train.drill.failpoints import reach
from trainmaster.train.feed import Feed
from trainmaster.train.parallel.shard import World


def evaluate(
    model: Decoder,
    feed: Feed,
    config: TrainConfig,
    world: World,
    *,
    beat: Callable[[], None] = lambda: None,  # called at each batch, for the heartbeat
) -> float | None:
    """Mean loss per counted token over the same held-out samples each time; None if told to stop on the way."""
    mine = world.rank_info.share(config.eval_sequences)
    at_once = config.micro_sequences or config.batch_sequences // world.rank_info.ranks  # what is known to fit
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)  # losses added up, tokens they are of
    for start in mine[::at_once]:
        reach("eval:batch")
        beat()
        count = min(at_once, mine.stop - start)
        if not feed.held_out_ready(start, count):
            model.train()
            return None
        batch = feed.held_out(start, count)
        counted = (batch.targets != NOT_COUNTED).sum()
        total += torch.stack([sum_of_losses(model, batch), counted]).cpu()
    model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])
