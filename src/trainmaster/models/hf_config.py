"""Conversion between HF's config.json and ModelConfig. What ModelConfig cannot express is refused, never dropped.

Every `model_type` is a table of what it has beyond the dimensions; its family owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.core.config.train import ModelConfig
from trainmaster.core.errors import Fault, SpecError, UsageError
from trainmaster.core.schema import build
from trainmaster.models import family

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
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_tokens": "original_max_position_embeddings",
}
# The only value of each that our decoders compute.
_ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,  # of all four projections; Qwen2's biases on three of them need no key
    "mlp_bias": False,
    "use_sliding_window": False,  # from some layer on; Mistral's, on all layers, is `sliding_window`
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfType:
    """One `model_type` of HF's."""

    model_type: str
    architecture: str
    features: Mapping[str, object]  # fields of ModelConfig that it has without saying so
    keys: Mapping[str, str]  # further fields that it states, ours: HF's
    # What transformers takes where the file says nothing, for keys that early files leave out. Any other absent number
    # is a fault: transformers would take the default of its class, which differs from type to type.
    absent: Mapping[str, Any]
    stated: Mapping[str, Any]  # written so that transformers does not assume another value


def model_type(config: ModelConfig) -> str:
    """HF's `model_type` for this shape; UsageError if none has these features together."""
    return family.of(config).model_type(config)


def to_hf(config: ModelConfig, *, dtype: str, end: int | None = None) -> dict[str, Any]:
    """The config.json of this shape. The keys are those of transformers 4, which 5 reads too.

    `end` is the token that ends a document, if it is known.
    """
    # Stated also where unknown: transformers would assume 1 and 2. Training puts no token before a document.
    return {**family.of(config).to_hf(config), "torch_dtype": dtype, "bos_token_id": None, "eos_token_id": end}


def from_hf(plain: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json; SpecError with everything that ModelConfig cannot express."""
    word = plain.get("model_type")
    known = {kind: name for name in family.names() for kind in family.find(name).model_types()}
    if not isinstance(word, str) or word not in known:
        message = f"{word!r} is not one of {', '.join(sorted(known))}"
        raise SpecError([Fault(path="config.json: model_type", message=message)])
    return family.find(known[word]).from_hf(plain)


def must_know(kind: HfType, foreign: Mapping[str, bool]) -> HfType:
    """The type, unless the shape has a feature that is foreign to it."""
    extra = [name for name, has in foreign.items() if has]
    if extra:
        raise UsageError(
            f"no HF family has this shape: it would be {kind.model_type}, which does not know {', '.join(extra)}"
        )
    return kind


def write(config: ModelConfig, kind: HfType) -> dict[str, Any]:
    """What config.json says of the computation, as this type states it."""
    plain: dict[str, Any] = {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        **{theirs: getattr(config, ours) for ours, theirs in _NUMBERS.items()},
        "head_dim": config.head_size,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        **kind.stated,
    }
    if config.context_tokens is None:
        del plain["max_position_embeddings"]
    if config.rope_scaling is not None:
        numbers = {theirs: getattr(config.rope_scaling, ours) for ours, theirs in _SCALING.items()}
        plain["rope_scaling"] = {"rope_type": "llama3", **numbers}
    return {**plain, **{theirs: getattr(config, ours) for ours, theirs in kind.keys.items()}}


def read(plain: Mapping[str, Any], kind: HfType) -> ModelConfig:
    """The shape that a config.json of this type states."""
    # How long a text may be changes no number that is computed, so it need not be stated.
    known = {"max_position_embeddings": None, **kind.absent, **plain, **_rope(plain)}
    faults = list(_foreign(kind, known))
    if faults:
        raise SpecError(faults)
    fields = {ours: known[theirs] for ours, theirs in (_NUMBERS | dict(kind.keys)).items()}
    fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
    if fields["head_width"] == fields["width"] // fields["heads"]:
        fields["head_width"] = None  # our way of saying so; a preset compares equal
    if known["rope_type"] == "llama3":
        fields["rope_scaling"] = {ours: known[theirs] for ours, theirs in _SCALING.items()}
    tied = known.get("tie_word_embeddings", False)  # the default of every type here
    return build(ModelConfig, {**fields, **kind.features, "tied": tied, "rope_theta": known["rope_theta"]})


def _rope(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotary embedding, flattened: transformers 4 uses two keys, version 5 one."""
    flat = {"rope_type": "default"}
    for key in ("rope_scaling", "rope_parameters"):
        part = plain.get(key) or {}
        if isinstance(part, Mapping):
            flat.update({"rope_type": part["type"]} if "type" in part else {}, **part)
    return flat


def _foreign(kind: HfType, known: Mapping[str, Any]) -> Iterator[Fault]:
    needed = [*_NUMBERS.values(), "rope_theta", *kind.keys.values()]
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
