"""A Transformer encoder of any size, for acceptance tests: many parameters and few operations load the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSize:
    """Layers, width, attention heads and tokens of a sequence."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    sequence: int = 512


class Block(nn.Module):
    """Attention and a feed-forward layer, each after its normalisation."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return cast(Tensor, x + self.down(functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Token ids (batch, tokens) to logits (batch, classes)."""

    def __init__(self, size: TransformerSize, *, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, size.width)
        self.position = nn.Parameter(torch.randn(size.sequence, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x).mean(1)))
