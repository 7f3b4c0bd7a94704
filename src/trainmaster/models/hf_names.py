"""HF's names of our weights. Several names: our tensor is those tensors stacked."""

from __future__ import annotations

from trainmaster.core.train_config import ModelConfig

_WHOLE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = {
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
    "feed.router": "block_sparse_moe.gate",
}
_EXPERT = {"feed.gate": "w1", "feed.up": "w3", "feed.down": "w2"}
# Tables that early Llama files saved beside the weights; they follow from the config.
DERIVED = ".rotary_emb.inv_freq"
HEAD = "lm_head.weight"


def hf_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """HF's names for our weight `name`, each a whole tensor of its file."""
    if not name.startswith("blocks."):
        module, kind = name.rsplit(".", 1)
        return (f"{_WHOLE[module]}.{kind}",)
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}"
    if rest in _EXPERT:
        assert config.experts is not None, f"{rest} stacks experts"
        return tuple(
            f"{prefix}.block_sparse_moe.experts.{expert}.{_EXPERT[rest]}.weight" for expert in range(config.experts)
        )
    module, kind = rest.rsplit(".", 1)
    return (f"{prefix}.{_BLOCK[module]}.{kind}",)
