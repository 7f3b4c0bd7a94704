"""What is different in Llama's family: an optional norm of each query and key head, and four types of HF's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.core.config.train import ModelConfig
from trainmaster.models.decoder_family import DecoderFamily
from trainmaster.models.family import Family
from trainmaster.models.hf_config import HfType, must_know

if TYPE_CHECKING:
    from trainmaster.models.decoder import Decoder


def _hf_type(
    model_type: str,
    architecture: str,
    *,
    keys: dict[str, str] | None = None,
    absent: dict[str, object],
    **features: bool,
) -> HfType:
    return HfType(
        model_type=model_type,
        architecture=architecture,
        features={"qkv_bias": False, "qk_norm": False, **features},
        keys=keys or {},
        absent=absent,
        stated={},
    )


_LLAMA = _hf_type(
    "llama", "LlamaForCausalLM", absent={"num_key_value_heads": None, "rope_theta": 10_000.0, "head_dim": None}
)
_MISTRAL = _hf_type(
    "mistral", "MistralForCausalLM", keys={"sliding_window": "sliding_window"}, absent={"head_dim": None}
)
_QWEN2 = _hf_type("qwen2", "Qwen2ForCausalLM", absent={"head_dim": None}, qkv_bias=True)
_QWEN3 = _hf_type("qwen3", "Qwen3ForCausalLM", absent={}, qk_norm=True)


class LlamaFamily(DecoderFamily):
    """Norms before each branch, which is Llama's block."""

    name = "llama"
    hf_types: tuple[HfType, ...] = (_LLAMA, _MISTRAL, _QWEN2, _QWEN3)

    def build(self, config: ModelConfig, *, max_tokens: int) -> Decoder:
        from trainmaster.models.decoder import Decoder
        from trainmaster.models.llama.model import LlamaBlock

        return Decoder(config, LlamaBlock, max_tokens=max_tokens)

    def _query_key_norms(self, config: ModelConfig) -> tuple[int, int] | None:
        return (config.head_size, config.head_size) if config.qk_norm else None

    def _hf_type(self, config: ModelConfig) -> HfType:
        window, sizes = config.sliding_window is not None, config.head_size * config.heads == config.width
        if config.qk_norm:
            kind, foreign = _QWEN3, {"qkv_bias": config.qkv_bias, "sliding_window": window}
        elif config.qkv_bias:
            kind, foreign = _QWEN2, {"sliding_window": window, "head_width": not sizes}
        elif window:
            kind, foreign = _MISTRAL, {}
        else:
            kind, foreign = _LLAMA, {"head_width": config.width % config.heads != 0}
        return must_know(kind, foreign)


FAMILY: Family = LlamaFamily()
