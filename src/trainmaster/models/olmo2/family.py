"""What is different in OLMo 2: norms after each branch, and over all heads of query and key at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import hf_names
from trainmaster.models.decoder_family import DecoderFamily
from trainmaster.models.family import BlockCost, Count, Family
from trainmaster.models.hf_config import HfType

if TYPE_CHECKING:
    from trainmaster.models.decoder import Decoder


class Olmo2Family(DecoderFamily):
    """Post-norms and QK-norm."""

    name = "olmo2"
    hf_types = (
        HfType(
            model_type="olmo2",
            architecture="Olmo2ForCausalLM",
            features={"family": "olmo2"},
            keys={},
            absent={"num_key_value_heads": None, "head_dim": None},
            # transformers would assume token 1, whose embedding then gets no gradient.
            stated={"pad_token_id": None},
        ),
    )
    hf_modules = hf_names.BLOCK | {
        "attention_norm": "post_attention_layernorm",
        "feed_norm": "post_feedforward_layernorm",
    }

    def block_cost(self, config: ModelConfig) -> BlockCost:
        plain = super().block_cost(config)
        width = config.width
        return replace(
            plain,
            # The scale of each of the four norms, and attention's sum of each head.
            kept_float32=4 + config.heads,
            # The norm behind `down` needs its input, so that the product's output stays in compiled code too.
            kept_ops=Count(compiled=plain.kept_ops.eager, eager=plain.kept_ops.eager),
            # A norm and the sum behind it are one pass: branch and stream read, stream written. Backward, each norm
            # reads two and writes one; four gradients of the stream are added below attention, three below gate and up.
            moved_forward=plain.moved_forward - 3 * width,
            moved_backward=plain.moved_backward + width,
        )

    def build(self, config: ModelConfig, *, max_tokens: int) -> Decoder:
        from trainmaster.models.decoder import Decoder
        from trainmaster.models.olmo2.model import Olmo2Block

        return Decoder(config, Olmo2Block, max_tokens=max_tokens)

    def _query_key_norms(self, config: ModelConfig) -> tuple[int, int]:
        return config.heads * config.head_size, config.kv_heads * config.head_size


FAMILY: Family = Olmo2Family()
