"""OLMo 2's block: attention, then feed-forward, each on the bare stream; its output is normed and added back.

The stream itself is never normed inside a block. Query and key are, each over all its heads at once.
"""

from __future__ import annotations

from torch import Tensor, nn

from trainmaster.core.config.train import ModelConfig
from trainmaster.models.attend import Mask
from trainmaster.models.decoder import Block
from trainmaster.models.layers import Attention, FeedForward


class Olmo2Block(Block):
    """RMSNorm after each branch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config, norm="projection")
        self.feed_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        x = x + self.attention_norm(self.attention(x, cos, sin, mask))
        added: Tensor = x + self.feed_norm(self.feed(x))
        return added
