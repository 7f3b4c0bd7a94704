"""Llama's block: attention, then feed-forward, each on the normed stream and added back to it."""

from __future__ import annotations

from torch import Tensor, nn

from trainmaster.core.config.train import ModelConfig
from trainmaster.models.attend import Mask
from trainmaster.models.decoder import Block
from trainmaster.models.layers import Attention, FeedForward


class LlamaBlock(Block):
    """RMSNorm before each branch; another `feed` may take the place of SwiGLU."""

    def __init__(self, config: ModelConfig, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config, norm="head" if config.qk_norm else None)
        self.feed_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed = feed if feed is not None else FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        added: Tensor = x + self.feed(self.feed_norm(x))
        return added
