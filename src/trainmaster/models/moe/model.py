"""Mixtral's block: Llama's, with experts in place of its feed-forward."""

from __future__ import annotations

from torch import nn

from trainmaster.core.config.train import ModelConfig
from trainmaster.models.llama.model import LlamaBlock
from trainmaster.models.moe.experts import MixtureOfExperts


class MoeBlock(LlamaBlock):
    """A block in which a router chooses experts for each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, MixtureOfExperts(config))

    def static_part(self) -> nn.Module:
        """How many tokens an expert gets is known to the host alone: that part stays eager."""
        return self.attention
