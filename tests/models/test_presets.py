"""A label equals its dimensions: every preset has the size its publisher states, and a name is never a lie."""

from __future__ import annotations

from math import prod

import pytest

from trainmaster.core.config import presets
from trainmaster.core.config.train import ModelConfig, TrainConfig
from trainmaster.core.errors import SpecError
from trainmaster.core.schema import build, to_plain
from trainmaster.models import family

# The known sizes of these models, a tied head counted once; written down here apart from the data file: whoever changes
# a dimension there must meet a number that did not change with it.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
}


def test_every_published_model_is_there() -> None:
    assert {name for name in presets.names() if not name.startswith("tiny-")} == set(PUBLISHED)


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.names())
def test_the_label_equals_the_dimensions(name: str) -> None:
    preset, config = presets.find(name), build(ModelConfig, {"preset": name})
    counted = sum(map(prod, family.weight_shapes(config).values()))
    assert counted == preset.parameters == PUBLISHED.get(name, counted)
    assert family.of(config).active_parameters(config) == preset.active_parameters
    assert config.name == name


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_leaves_no_dimension_to_a_default(name: str) -> None:
    """The defaults are those of a toy; a preset that relied on one would change with it."""
    stated = {"layers", "width", "heads", "kv_heads", "ffn_width", "vocab", "rope_theta", "norm_eps", "tied"}
    assert stated | {"context_tokens"} <= set(presets.find(name).model)


def test_what_is_written_beside_a_preset_wins_and_takes_its_name_away() -> None:
    config = build(TrainConfig, {"model": {"preset": "mistral-7b", "layers": 2, "sliding_window": None}}).model
    assert (config.layers, config.width, config.sliding_window) == (2, 4096, None)
    assert config.name is None


def test_a_config_sent_to_a_node_needs_no_presets() -> None:
    config = build(ModelConfig, {"preset": "llama3.2-1b"})
    sent = to_plain(config)
    assert sent["preset"] is None and sent["layers"] == 16
    assert build(ModelConfig, sent) == config


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"preset": "llama3.1-8"}, "model.preset: there is no preset 'llama3.1-8'; did you mean `llama3.1-8b`?"),
        ({"preset": "gpt5"}, "known: llama2-7b"),
        ({"preset": 8}, "model.preset: expected text"),
        ({"preset": "llama3.1-8b", "heads": 7}, "model.heads: 7 does not divide width 4096 evenly; use 8"),
        ({"preset": "qwen3-8b", "head_width": 127}, "model.head_width: 127 is odd"),
        ({"preset": "mixtral-8x7b", "experts": 1}, "model.experts_per_token: 2 of 1 experts"),
        ({"rope_scaling": {"factor": 8, "low_freq_factor": 4}}, "model.rope_scaling.low_freq_factor: 4.0 is not below"),
    ],
)
def test_a_wrong_model_is_refused_with_what_to_write(model: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        build(TrainConfig, {"model": model})
    assert says in str(caught.value)


def test_faults_beside_an_unknown_preset_are_named_too() -> None:
    with pytest.raises(SpecError) as caught:
        build(TrainConfig, {"model": {"preset": "lama", "layers": "many", "widht": 8}})
    assert [fault.path for fault in caught.value.faults] == ["model.preset", "model.layers", "model.widht"]
