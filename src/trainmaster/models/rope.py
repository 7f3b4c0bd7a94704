"""Rotary position embedding: each pair of a head's dimensions is rotated by an angle proportional to the position.

Dimension i is paired with i + half, as in every HF checkpoint. Meta's own Llama files pair neighbours; HF permuted the
rows of query and key when it converted them, so nothing is permuted between HF and us.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainmaster.core.config.train import ModelConfig, RopeScaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (…, tokens, head size) by its positions' angles."""
    # In float32: bfloat16 has 8 bits of mantissa and cannot tell neighbouring positions of a long sequence apart.
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x)


def tables(config: ModelConfig, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, (tokens, half a head) each."""
    half = config.head_size // 2
    rate = config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
    if config.rope_scaling is not None:
        rate = _stretch(rate, config.rope_scaling)
    angle = torch.outer(torch.arange(max_tokens, dtype=torch.float64, device="cpu"), rate)
    return angle.cos().float(), angle.sin().float()


def _stretch(rate: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: slow waves are slowed by `factor`, fast ones stay, those between go smoothly from one to the
    other (llama-models, `apply_scaling`)."""
    turns = scaling.original_tokens * rate / (2 * math.pi)  # of each wave within the original context
    stay = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    stay = stay.clamp(0, 1)
    return rate * (stay + (1 - stay) / scaling.factor)
