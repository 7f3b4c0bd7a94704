"""AdamW and one guarded step of it. The learning rate is in core/config/schedule.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainmaster.core.config.train import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all weights, with weight decay on matrices only."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1]},
        {"params": [weight for weight in weights if weight.ndim <= 1]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=True)
    configure(optimizer, config)
    return optimizer


def configure(optimizer: torch.optim.AdamW, config: OptimizerConfig) -> None:
    """Set betas and weight decay from the config. Needed after a load, which restores the checkpoint's."""
    for group, decay in zip(optimizer.param_groups, (config.weight_decay, 0.0), strict=True):
        group["betas"] = (config.beta1, config.beta2)
        group["weight_decay"] = decay


def update(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    *,
    loss: Tensor,
    lr: float,
    grad_clip: float,
    most_loss: float = math.inf,
    most_norm: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """Clip the gradients, update the weights, clear the gradients. Returns the norm before clipping, and if it was bad.

    A loss or norm that is not finite, or above the most that is healthy, moves nothing: one such update could leave no
    weight usable. `loss` and norm are of the whole batch, so all ranks skip together. Decided on the device: the host
    need not wait for it.
    """
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = gradient_norm(gradients)
    sick = ~(norm.isfinite() & loss.isfinite() & (norm <= most_norm) & (loss <= most_loss))
    # The words of torch.amp's GradScaler: the fused kernel divides by one, and leaves everything alone for the other.
    optimizer.grad_scale = (norm / grad_clip).clamp(min=1).to(gradients[0].device)  # type: ignore[attr-defined]
    optimizer.found_inf = sick.float().to(gradients[0].device)  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, sick


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Global norm of the gradients over all ranks, in float32."""
    parts = [part.to_local() if isinstance(part, DTensor) else part for part in gradients]
    norms = torch._foreach_norm(parts, 2, dtype=torch.float32)
    square = torch.stack(norms).square().sum()
    first = gradients[0]
    if isinstance(first, DTensor):
        # Over the ranks that share one copy; with hybrid sharding every copy has the same gradients.
        mesh = first.device_mesh
        square = square.to(mesh.device_type)  # offloaded gradients are on the host
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    return square.sqrt()
