"""Conversion between HF's config.json and ModelConfig. What ModelConfig cannot express is refused, never dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainmaster.core.errors import Fault, SpecError, UsageError
from trainmaster.core.schema import build
from trainmaster.core.train_config import ModelConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NUMBERS = {  # ours: HF's
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "ffn_width": "intermediate_size",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "context_tokens": "max_position_embeddings",
}
_EXPERTS = {
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "balance": "router_aux_loss_coef",
}
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_tokens": "original_max_position_embeddings",
}
# What transformers takes where the file says nothing, for keys that early files leave out. Any other absent number is
# a fault: transformers would take the default of its class, which differs from family to family.
_ABSENT: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_key_value_heads": None, "rope_theta": 10_000.0, "head_dim": None},
    "mistral": {"head_dim": None},
    "mixtral": {"head_dim": None},
    "qwen2": {"head_dim": None},
    "qwen3": {},
}
# The only value of each that our decoder computes.
_ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,  # of all four projections; Qwen2's biases on three of them need no key
    "mlp_bias": False,
    "use_sliding_window": False,  # from some layer on; Mistral's, on all layers, is `sliding_window`
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}


def family_of(config: ModelConfig) -> str:
    """HF's `model_type` for this shape; UsageError if no family has these features together."""
    window, sizes = config.sliding_window is not None, config.head_size * config.heads == config.width
    if config.experts is not None:
        family, foreign = "mixtral", {"qk_norm": config.qk_norm, "qkv_bias": config.qkv_bias}
    elif config.qk_norm:
        family, foreign = "qwen3", {"qkv_bias": config.qkv_bias, "sliding_window": window}
    elif config.qkv_bias:
        family, foreign = "qwen2", {"sliding_window": window, "head_width": not sizes}
    elif window:
        family, foreign = "mistral", {}
    else:
        family, foreign = "llama", {"head_width": config.width % config.heads != 0}
    extra = [name for name, has in foreign.items() if has]
    if extra:
        raise UsageError(f"no HF family has this shape: it would be {family}, which does not know {', '.join(extra)}")
    return family


def to_hf(config: ModelConfig, *, dtype: str, end: int | None = None) -> dict[str, Any]:
    """The config.json of this shape. The keys are those of transformers 4, which 5 reads too.

    `end` is the token that ends a document, if it is known.
    """
    family = family_of(config)
    plain: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        **{theirs: getattr(config, ours) for ours, theirs in _NUMBERS.items()},
        "head_dim": config.head_size,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        # Stated also where unknown: transformers would assume 1 and 2. Training puts no token before a document.
        "bos_token_id": None,
        "eos_token_id": end,
    }
    if config.context_tokens is None:
        del plain["max_position_embeddings"]
    if config.rope_scaling is not None:
        numbers = {theirs: getattr(config.rope_scaling, ours) for ours, theirs in _SCALING.items()}
        plain["rope_scaling"] = {"rope_type": "llama3", **numbers}
    if family in ("mistral", "mixtral"):
        plain["sliding_window"] = config.sliding_window
    if family == "mixtral":
        plain.update({theirs: getattr(config, ours) for ours, theirs in _EXPERTS.items()})
    return plain


def from_hf(plain: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json; SpecError with everything that ModelConfig cannot express."""
    family = plain.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        message = f"{family!r} is not one of {', '.join(ARCHITECTURES)}"
        raise SpecError([Fault(path="config.json: model_type", message=message)])
    # How long a text may be changes no number that is computed, so it need not be stated.
    known = {"max_position_embeddings": None, **_ABSENT[family], **plain, **_rope(plain)}
    faults = list(_foreign(family, known))
    if faults:
        raise SpecError(faults)
    fields = {ours: known[theirs] for ours, theirs in _NUMBERS.items()}
    fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
    if fields["head_width"] == fields["width"] // fields["heads"]:
        fields["head_width"] = None  # our way of saying so; a preset compares equal
    if family == "mixtral":
        fields.update({ours: known[theirs] for ours, theirs in _EXPERTS.items()})
    if family in ("mistral", "mixtral"):
        fields["sliding_window"] = known["sliding_window"]
    if known["rope_type"] == "llama3":
        fields["rope_scaling"] = {ours: known[theirs] for ours, theirs in _SCALING.items()}
    tied = known.get("tie_word_embeddings", False)  # the default of every family here
    features = {"tied": tied, "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    return build(ModelConfig, {**fields, **features, "rope_theta": known["rope_theta"]})


def _rope(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotary embedding, flattened: transformers 4 uses two keys, version 5 one."""
    flat = {"rope_type": "default"}
    for key in ("rope_scaling", "rope_parameters"):
        part = plain.get(key) or {}
        if isinstance(part, Mapping):
            flat.update({"rope_type": part["type"]} if "type" in part else {}, **part)
    return flat


def _foreign(family: str, known: Mapping[str, Any]) -> Iterator[Fault]:
    needed = [*_NUMBERS.values(), "rope_theta"]
    if family in ("mistral", "mixtral"):
        needed.append("sliding_window")
    if family == "mixtral":
        needed.extend(_EXPERTS.values())
    if known["rope_type"] == "llama3":
        needed.extend(_SCALING.values())
    elif known["rope_type"] != "default":
        message = f"{known['rope_type']!r} is not supported; default and llama3 are"
        yield Fault(path="config.json: rope_type", message=message)
    for key in needed:
        if key not in known:
            yield Fault(path=f"config.json: {key}", message="missing; write the value that the model was trained with")
    for key, value in _ONLY.items():
        if known.get(key, value) != value:
            yield Fault(path=f"config.json: {key}", message=f"{known[key]!r} is not supported; only {value!r} is")
    kinds = set(known.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        message = f"{', '.join(sorted(map(str, kinds)))}: layers of different attention are not supported"
        yield Fault(path="config.json: layer_types", message=message)
