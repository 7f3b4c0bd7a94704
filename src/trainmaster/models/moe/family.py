"""What is different in a mixture of experts: stacked weights, of which each token passes through a few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import hf_names
from trainmaster.models.family import BlockCost, Count, Family, Shape
from trainmaster.models.hf_config import HfType, must_know
from trainmaster.models.llama.family import LlamaFamily

if TYPE_CHECKING:
    from trainmaster.models.decoder import Decoder

_MIXTRAL = HfType(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    features={"qkv_bias": False, "qk_norm": False},
    keys={
        "sliding_window": "sliding_window",
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "balance": "router_aux_loss_coef",
    },
    absent={"head_dim": None},
    stated={},
)
_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


class MoeFamily(LlamaFamily):
    """Llama's block with experts in it."""

    name = "moe"
    hf_types = (_MIXTRAL,)
    hf_modules = hf_names.BLOCK | {"feed.router": "block_sparse_moe.gate"}

    def active_parameters(self, config: ModelConfig) -> int:
        experts, chosen = _experts(config), self._experts_per_token(config)
        idle = experts - min(experts, chosen)
        return super().active_parameters(config) - config.layers * idle * 3 * config.width * config.ffn_width

    def block_cost(self, config: ModelConfig) -> BlockCost:
        dense = super().block_cost(config)
        # Rows in the order of their experts, and what came back.
        rows = 2 * config.width * self._experts_per_token(config)
        return replace(dense, kept=Count(compiled=dense.kept.compiled + rows, eager=dense.kept.eager + rows))

    def build(self, config: ModelConfig, *, max_tokens: int) -> Decoder:
        from trainmaster.models.decoder import Decoder
        from trainmaster.models.moe.model import MoeBlock

        return Decoder(config, MoeBlock, max_tokens=max_tokens)

    def hf_names(self, name: str, config: ModelConfig) -> tuple[str, ...]:
        block, _, matrix = name.rpartition(".feed.")
        if matrix not in _EXPERT:
            return super().hf_names(name, config)
        prefix = f"{block.replace('blocks.', 'model.layers.')}.block_sparse_moe.experts"
        return tuple(f"{prefix}.{expert}.{_EXPERT[matrix]}.weight" for expert in range(_experts(config)))

    def _hf_type(self, config: ModelConfig) -> HfType:
        return must_know(_MIXTRAL, {"qk_norm": config.qk_norm, "qkv_bias": config.qkv_bias})

    def _experts_per_token(self, config: ModelConfig) -> int:
        return config.experts_per_token

    def _feed_shapes(self, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
        experts = _experts(config)
        yield "feed.gate", (experts * config.ffn_width, config.width)
        yield "feed.up", (experts * config.ffn_width, config.width)
        yield "feed.down", (experts * config.width, config.ffn_width)
        yield "feed.router.weight", (experts, config.width)


def _experts(config: ModelConfig) -> int:
    assert config.experts is not None, "a shape without experts is of another family"
    return config.experts


FAMILY: Family = MoeFamily()
