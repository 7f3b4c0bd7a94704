"""HF's names of the weights that every decoder has. A family adds those of its own modules."""

from __future__ import annotations

from collections.abc import Mapping

_WHOLE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_norm": "post_attention_layernorm",
    "feed.gate": "mlp.gate_proj",
    "feed.up": "mlp.up_proj",
    "feed.down": "mlp.down_proj",
}
# Tables that early Llama files saved beside the weights; they follow from the config.
DERIVED = ".rotary_emb.inv_freq"
HEAD = "lm_head.weight"


def plain_name(name: str, modules: Mapping[str, str]) -> str:
    """HF's name for our weight, which is a whole tensor of its file too; `modules` are those of a block."""
    if not name.startswith("blocks."):
        module, kind = name.rsplit(".", 1)
        return f"{_WHOLE[module]}.{kind}"
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.layers.{layer}.{modules[module]}.{kind}"
