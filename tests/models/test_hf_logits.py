"""Logits equal to those of `transformers` on the same weights: after reading its folder, and after it reads ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainmaster.core.config import presets
from trainmaster.core.config.train import ModelConfig
from trainmaster.core.schema import build
from trainmaster.models import family, hf
from trainmaster.models.decoder import Decoder
from trainmaster.models.hf_config import from_hf, to_hf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
TOKENS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))  # longer than the tiny window
SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 1024,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "mistral-whole": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-untied": {"model_type": "qwen3", "head_dim": 32},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


def theirs(name: str) -> PreTrainedModel:
    """A random model of transformers whose every weight matters: norms and biases are no ones and zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    words = {**SHAPE, **FAMILIES[name]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(words.pop("model_type"), **words))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)
    return model.eval()


def ours(folder: Path) -> Decoder:
    with hf.HfFolder(folder) as found:
        model = family.build(found.config, max_tokens=TOKENS.shape[1])
        model.init_weights(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(found.read(name))
    return model.eval()


@torch.no_grad()
def difference(model: Decoder, other: PreTrainedModel) -> float:
    expected = other(TOKENS).logits
    assert float(expected.std()) > 0.1, "logits near zero would agree with anything"
    return float((model(TOKENS) - expected).abs().max())


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_after_import_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    other = theirs(name)
    other.save_pretrained(tmp_path)
    assert difference(ours(tmp_path), other) <= TOLERANCE


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-mixtral", "tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_transformers_reads_what_we_write(name: str, shard_bytes: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = build(ModelConfig, {"preset": name})
    model = family.build(config, max_tokens=TOKENS.shape[1]).eval()
    model.init_weights(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
    weights = dict(model.named_parameters())
    files = hf.write(tmp_path / "out", config, lambda key: weights[key].detach(), dtype="fp32", shard_bytes=shard_bytes)
    assert (len([file for file in files if file.suffix == ".safetensors"]) > 1) is (shard_bytes < 1 << 30)
    other, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), "a weight was missing, left over or of another shape"
    assert difference(model, other.eval()) <= TOLERANCE
    back = ours(tmp_path / "out")
    assert back.config == config
    assert all(torch.equal(weight, weights[key]) for key, weight in back.named_parameters())


@pytest.mark.parametrize("name", presets.names())
def test_transformers_counts_what_the_preset_says(name: str) -> None:
    """Its own class, built from the config we would write: the same number of weights, and back to the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = build(ModelConfig, {"preset": name})
    plain = json.loads(json.dumps(to_hf(config, dtype="bfloat16")))
    assert from_hf(plain) == config
    words = {key: value for key, value in plain.items() if key != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(words.pop("model_type"), **words))
    assert sum(weight.numel() for weight in model.parameters()) == presets.find(name).parameters
