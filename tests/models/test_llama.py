"""The decoder: its weights after a meta-device birth, its causality, its counts."""

from __future__ import annotations

import pytest
import torch

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import family
from trainmaster.models.decoder import Decoder, count_parameters

TINY = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, ffn_width=64)


def born_on_meta(config: ModelConfig, *, seed: int) -> Decoder:
    with torch.device("meta"):
        model = family.build(config, max_tokens=16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for held in (*model.parameters(), *model.buffers()):
            held.fill_(float("nan"))  # what to_empty leaves is anything; make it show
    model.init_weights(seed)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_and_buffer_is_filled_after_meta_birth(tied: bool) -> None:
    wide = ModelConfig(layers=2, width=128, heads=4, kv_heads=2, ffn_width=256, tied=tied)
    model = born_on_meta(wide, seed=3)
    assert all(held.isfinite().all() for held in (*model.parameters(), *model.buffers()))
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        expected = weight.shape[1] ** -0.5
        if name.endswith(("output.weight", "down.weight")):
            expected /= 2.0  # sqrt(2 × 2 layers)
        if name == "embedding.weight":
            expected = wide.width**-0.5 if tied else 1.0
        assert float(weight.detach().std()) == pytest.approx(expected, rel=0.05), name
        assert abs(float(weight.detach().mean())) < expected * 0.05, name


def test_meta_birth_gives_the_model_that_plain_birth_gives() -> None:
    plain = family.build(TINY, max_tokens=16)
    plain.init_weights(5)
    tokens = torch.arange(16).view(1, 16)
    assert torch.equal(born_on_meta(TINY, seed=5)(tokens), plain(tokens))
    assert not torch.equal(born_on_meta(TINY, seed=6)(tokens), plain(tokens))


def test_no_two_weights_start_alike() -> None:
    model = born_on_meta(TINY, seed=0)
    first, second = (block.feed.up.weight for block in model.blocks)
    assert not torch.equal(first, second)


def test_a_later_token_changes_no_earlier_prediction() -> None:
    model = born_on_meta(TINY, seed=0)
    tokens = torch.arange(16).view(1, 16)
    changed = tokens.clone()
    changed[0, 10] = 200
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:10], after[:10])
    assert not torch.allclose(before[10:], after[10:])


def test_positions_matter() -> None:
    """Without rotary tables attention would be a bag of words: the last prediction could not tell the order."""
    model = born_on_meta(TINY, seed=0)
    one, other = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(model(one)[0, -1], model(other)[0, -1])


def test_rotary_tables_are_not_saved() -> None:
    assert not [name for name in born_on_meta(TINY, seed=0).state_dict() if "rope" in name]


@pytest.mark.parametrize("tied", [True, False])
def test_counts_follow_the_convention(tied: bool) -> None:
    config = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, ffn_width=64, vocab=100, tied=tied)
    table = 100 * 32
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    multiplying = table + 2 * block + 32
    parameters = count_parameters(family.build(config, max_tokens=8))
    assert parameters == multiplying + (0 if tied else table)
    flops = family.of(config).flops_per_token(config, sequence_tokens=8)
    assert flops == 6 * multiplying + 12 * 2 * 32 * 8


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("width", "std"), [(64, 0.125), (160, 0.0791), (640, 0.0198), (2048, 0.00618)])
def test_the_head_starts_smaller_the_wider_the_model_is(width: int, std: float, tied: bool) -> None:
    config = ModelConfig(layers=1, width=width, heads=4, kv_heads=4, ffn_width=8, vocab=300, tied=tied)
    with torch.device("meta"):
        model = family.build(config, max_tokens=8)
    model.to_empty(device="cpu")
    model.init_weights(seed=3)
    head = model.embedding if model.head is None else model.head
    assert float(head.weight.detach().std()) == pytest.approx(std, rel=0.02)
