"""Matrix products in float8 with dynamic scaling: a Linear whose forward and backward run on the float8 tensor cores.

Before each product both sides are divided by a scale that brings their largest value to the type's largest, and cast;
nothing is remembered between steps. Activations and weights are e4m3 (more mantissa), gradients e5m2 (more range).
Weights, optimizer and checkpoints know nothing of it. Meant to be compiled: the casts then fuse with what is around.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainmaster.core.errors import UsageError
from trainmaster.models.decoder import Decoder

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_FIRST_CAPABLE = (8, 9)  # Ada; Hopper is 9.0
_MULTIPLE = 16  # both sides of a matrix, as cuBLAS wants them


class Float8Linear(nn.Linear):
    """nn.Linear in all but the arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = _Product.apply(x.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        y = rows.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def use_float8(model: Decoder, device: torch.device) -> None:
    """Every Linear of every block, before the model has memory. Embedding and head stay as they are: they hold the rare
    words, and the loss is most sensitive to them."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_CAPABLE:
        name = torch.cuda.get_device_name(device)
        raise UsageError(
            f"parallel.float8: {name} has no float8 tensor cores (Ada and Hopper were the first); leave it out"
        )
    for block in model.blocks:
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, _replaced(child))


def _replaced(linear: nn.Linear) -> Float8Linear:
    if linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE:
        shape = f"{linear.out_features} × {linear.in_features}"
        raise UsageError(f"parallel.float8: a matrix of {shape}; both must be multiples of {_MULTIPLE}")
    swapped = Float8Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        device=linear.weight.device,
        dtype=linear.weight.dtype,
    )
    return swapped


class _Product(torch.autograd.Function):
    """x (tokens, in) times the transposed weight (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        left, right = _scale_of(x, FORWARD), _scale_of(weight, FORWARD)
        return _multiply(_cast(x, left, FORWARD), _cast(weight, right, FORWARD).t(), left, right, like=x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        # The product wants rows on its left and columns on its right, so three of the four are written transposed.
        down, left, right = _scale_of(gradient, BACKWARD), _scale_of(x, FORWARD), _scale_of(weight, FORWARD)
        by_x = _multiply(
            _cast(gradient, down, BACKWARD),
            _cast(weight, right, FORWARD).t().contiguous().t(),
            down,
            right,
            like=x,
        )
        by_weight = _multiply(
            _cast(gradient, down, BACKWARD).t().contiguous(),
            _cast(x, left, FORWARD).t().contiguous().t(),
            down,
            left,
            like=weight,
        )
        return by_x, by_weight


def _scale_of(x: Tensor, kind: torch.dtype) -> Tensor:
    """What brings the largest value to the largest of the type; of zeros it is anything finite."""
    return torch.finfo(kind).max / x.abs().amax().float().clamp(min=1e-12)


def _cast(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    most = torch.finfo(kind).max
    # Clamped: float8 casts do not saturate, and rounding may lift the largest value above the type's end.
    return (x.float() * scale).clamp(-most, most).to(kind)


def _multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, like: Tensor) -> Tensor:
    product: Tensor = torch._scaled_mm(
        a,
        b,
        scale_a=scale_a.reciprocal(),
        scale_b=scale_b.reciprocal(),
        out_dtype=like.dtype,
        use_fast_accum=True,
    )
    return product
