"""AdamW, its learning rate over time, and one guarded step of it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainmaster.core.train_config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all weights; only matrices decay, norms do not."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1]},
        {"params": [weight for weight in weights if weight.ndim <= 1]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=True)
    configure(optimizer, config)
    return optimizer


def configure(optimizer: torch.optim.AdamW, config: OptimizerConfig) -> None:
    """Put the config's numbers in. Needed again after a load: a checkpoint brings its own, and the config must win."""
    for group, decay in zip(optimizer.param_groups, (config.weight_decay, 0.0), strict=True):
        group["betas"] = (config.beta1, config.beta2)
        group["weight_decay"] = decay


def learning_rate(config: OptimizerConfig, *, step: int, steps: int) -> float:
    """Of step `step`, the first being 0: a line up to the peak, then half a cosine down to its last share."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def update(model: nn.Module, optimizer: torch.optim.AdamW, *, lr: float, grad_clip: float) -> float:
    """Clip the gradients, move the weights, clear the gradients; returns the norm before clipping.

    A norm that is not finite moves nothing: one such update would leave no weight usable. The norm is over all ranks,
    so they all skip together.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    grad_norm = float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
    if math.isfinite(grad_norm):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm
