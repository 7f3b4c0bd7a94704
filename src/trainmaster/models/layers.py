"""Attention and feed-forward, the layers that the families share."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import Tensor, nn

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import rope
from trainmaster.models.attend import Mask, attend


class Attention(nn.Module):
    """Causal attention; `heads / kv_heads` query heads share each key and value head.

    A mask takes the place of plain causality. `norm` is what RMSNorms of query and key are over, before they are
    turned: each head, or the whole projection.
    """

    def __init__(self, config: ModelConfig, *, norm: Literal["head", "projection"] | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        query, key, eps = self.heads * self.head_size, self.kv_heads * self.head_size, config.norm_eps
        self.query = nn.Linear(config.width, query, bias=config.qkv_bias)
        self.key = nn.Linear(config.width, key, bias=config.qkv_bias)
        self.value = nn.Linear(config.width, key, bias=config.qkv_bias)
        self.output = nn.Linear(query, config.width, bias=False)
        self.norm_over_heads = norm == "head"
        if norm == "head":
            query = key = self.head_size
        self.query_norm = nn.RMSNorm(query, eps=eps) if norm is not None else None
        self.key_norm = nn.RMSNorm(key, eps=eps) if norm is not None else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        batch, length, _ = x.shape

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(batch, length, heads, self.head_size).transpose(1, 2)

        query, key = self.query(x), self.key(x)
        if not self.norm_over_heads:
            query, key = self._norm(query, key)
        query, key = split(query, self.heads), split(key, self.kv_heads)
        if self.norm_over_heads:
            query, key = self._norm(query, key)
        query, key = rope.rotate(query, cos, sin), rope.rotate(key, cos, sin)
        value = split(self.value(x), self.kv_heads)
        projected: Tensor = self.output(attend(query, key, value, mask).transpose(1, 2).flatten(2))
        return projected

    def _norm(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return self.query_norm(query), self.key_norm(key)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected
