"""Chunked cross-entropy from the hidden state: the whole logits are never in memory.

At 8192 tokens and 128,256 words the logits would be 2 GB in bfloat16, and plain cross-entropy keeps them several times
over, in float32. Here a chunk's logits become its losses and at once the gradients of hidden state and head, in the
forward pass; the backward pass only scales them by what comes from above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NOT_COUNTED = -100  # as in F.cross_entropy: a target that is no target
Judge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Of one chunk's logits. 4096 tokens of 128,256 words in bfloat16: wide enough that its matrix products run at full
# speed and the head's gradient is not added up too often, small beside the activations.
_CHUNK_BYTES = 1 << 30


class AddsLoss(nn.Module):
    """A module that adds the gradient of a loss of its own, as the router of a mixture does."""

    # Who accumulates the gradients of n batches, each loss divided by n, divides this one by n too.
    loss_scale: float = 1.0


def judge(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the counted losses, and its gradient with respect to the logits, in their type."""
    wide = logits.float()
    counted = (targets != NOT_COUNTED).unsqueeze(-1)
    answer = torch.where(counted, targets.unsqueeze(-1), 0)
    level = wide.logsumexp(dim=-1, keepdim=True)
    total = ((level - wide.gather(-1, answer)) * counted).sum()
    is_answer = torch.arange(wide.shape[-1], device=wide.device) == answer
    gradient = ((wide - level).exp() - is_answer.float()) * counted
    return total, gradient.type_as(logits)


def sum_of_losses(hidden: Tensor, head: Tensor, targets: Tensor, *, judge: Judge = judge) -> Tensor:
    """Sum of the cross-entropy of all counted targets, in float32.

    `hidden` is (…, width), `head` (vocabulary, width), `targets` (…). `judge` may be a compiled one. Backward runs
    once: it scales in place what the forward pass has kept.
    """
    rows, answers = hidden.flatten(0, -2), targets.flatten()
    needed = torch.is_grad_enabled()  # the function below cannot tell: inside of it gradients are always off
    total: Tensor = _Loss.apply(rows, head, answers, judge, needed)  # type: ignore[no-untyped-call]
    return total


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes no keywords)
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, judge: Judge, needed: bool
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        by_hidden = torch.empty_like(hidden) if needed else None
        # In float32 whatever the head is in: it is a sum over all tokens, and bfloat16 would drop the small ones.
        by_head = torch.zeros_like(head, dtype=torch.float32) if needed else None
        for start in range(0, len(hidden), _chunk_tokens(head)):
            chunk = slice(start, start + _chunk_tokens(head))
            loss, gradient = judge(hidden[chunk] @ head.t(), targets[chunk])
            total += loss
            if by_hidden is not None and by_head is not None:
                torch.mm(gradient, head, out=by_hidden[chunk])
                _add_product(by_head, gradient.t(), hidden[chunk])
        if needed:
            ctx.save_for_backward(by_hidden, by_head)
            ctx.head_type = head.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        by_hidden, by_head = ctx.saved_tensors
        scale = gradients[0]
        return by_hidden.mul_(scale), by_head.mul_(scale).to(ctx.head_type), None, None, None


def _chunk_tokens(head: Tensor) -> int:
    return max(256, _CHUNK_BYTES // (head.shape[0] * head.element_size()) // 256 * 256)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to a float32 sum."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.is_cuda:
        # cuBLAS adds up and writes float32; a bfloat16 product would be rounded on its way into the sum.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
