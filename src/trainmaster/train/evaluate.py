"""The loss on held-out samples. Reads its own stream, so the training cursor stays where it is."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import nn

from trainmaster import datasets
from trainmaster.core.train_config import TrainConfig
from trainmaster.datasets import Source
from trainmaster.train import agree
from trainmaster.train.shard import World
from trainmaster.train.stop import Stop


@torch.no_grad()
def evaluate(model: nn.Module, source: Source, config: TrainConfig, world: World, stop: Stop) -> float | None:
    """Mean loss per token over the same held-out samples each time; None if told to stop on the way."""
    mine = world.place.share(config.eval_sequences)
    at_once = len(world.place.share(config.batch_sequences))  # what is known to fit
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    for start in mine[::at_once]:
        if agree.any_rank(stop.asked() is not None):
            model.train()
            return None
        count = min(at_once, mine.stop - start)
        rows = datasets.batch(source, start, count, sequence_tokens=config.sequence_tokens, held_out=True)
        rows = rows.to(world.device)
        logits = model(rows[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum").cpu()
    model.train()
    dist.all_reduce(total)
    return float(total.item()) / (config.eval_sequences * config.sequence_tokens)
