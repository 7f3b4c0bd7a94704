"""Mixture of experts as in Mixtral: each token passes through the experts that its router chose.

Every token gets all the experts it chose: there is no capacity and nothing is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import Tensor, nn

from trainmaster.core.config.train import ModelConfig
from trainmaster.models.loss import AddsLoss


class MixtureOfExperts(AddsLoss):
    """SwiGLU experts. While training it adds the gradient of a load-balancing loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None, "a dense model has a FeedForward"
        self.experts, self.per_token = config.experts, config.experts_per_token
        self.balance = config.balance / config.layers
        self.router = nn.Linear(config.width, config.experts, bias=False)
        # One matrix for all experts, one below the other: FSDP cuts it evenly over any number of ranks, and every rank
        # has a gradient for it whichever experts its tokens chose. With a weight for each expert, a rank where one had
        # no tokens would bring fewer gradients to the reduction than the others.
        self.gate = nn.Parameter(torch.empty(config.experts * config.ffn_width, config.width))
        self.up = nn.Parameter(torch.empty(config.experts * config.ffn_width, config.width))
        self.down = nn.Parameter(torch.empty(config.experts * config.width, config.ffn_width))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).float().softmax(dim=-1)  # (batch, tokens, experts)
        weights, chosen = shares.topk(self.per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        load = F.one_hot(chosen, self.experts).sum(dim=-2)  # which experts each token chose
        order = chosen.flatten().argsort(stable=True)  # every choice of every token, by expert
        rows = x.flatten(0, -2).repeat_interleave(self.per_token, dim=0)[order]
        outputs = self._pass_through(rows, load.sum(dim=(0, 1)).tolist())
        # Back in the tokens' order by a permutation, not by adding rows up: additions on a GPU come in any order.
        outputs = outputs[order.argsort()].view(*chosen.shape, x.shape[-1])
        mixed: Tensor = (outputs * weights.unsqueeze(-1)).sum(dim=-2).type_as(x)
        if self.balance and self.training and torch.is_grad_enabled():
            loss = balance_loss(shares, load) * (self.balance * self.loss_scale)
            mixed = _Beside.apply(mixed, loss)  # type: ignore[no-untyped-call]
        return mixed

    def _pass_through(self, rows: Tensor, load: list[int]) -> Tensor:
        """Apply each expert to its rows, one expert after another."""
        matrices = (self.gate.chunk(self.experts), self.up.chunk(self.experts), self.down.chunk(self.experts))
        return torch.cat(
            [
                F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
                for part, gate, up, down in zip(torch.split(rows, load), *matrices, strict=True)
            ]
        )


def balance_loss(shares: Tensor, load: Tensor) -> Tensor:
    """Equation 4 of Switch Transformer (arXiv 2101.03961) over each sequence, its mean over the batch.

    `shares` are the router's probabilities and `load` the choices, both (batch, tokens, experts). By sequence, because
    the product of two means over a batch would depend on how the batch is divided among ranks.
    """
    fraction = load.float().mean(dim=1)
    return shares.shape[-1] * (fraction * shares.mean(dim=1)).sum(dim=-1).mean()


class _Beside(torch.autograd.Function):
    """Gives its first input on as it is, and lets the second, a loss, have its gradient when that one gets its own.

    The model then still returns logits alone, and the gradient arrives inside the block, where FSDP has its weights.
    """

    @staticmethod
    def forward(_: Any, x: Tensor, loss: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), device=gradients[0].device)
