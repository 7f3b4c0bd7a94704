"""What the other families add: windows, experts, norms, biases; first weights, gradients and operation counts."""

from __future__ import annotations

from math import prod

import pytest
import torch

from trainmaster.core.config import presets
from trainmaster.core.config.train import ModelConfig
from trainmaster.core.schema import build
from trainmaster.models import family
from trainmaster.models.decoder import Decoder
from trainmaster.models.moe.experts import MixtureOfExperts, balance_loss

TINY = [name for name in presets.names() if name.startswith("tiny-")]


def preset(name: str, **changes: object) -> ModelConfig:
    return build(ModelConfig, {"preset": name, **changes})


def born(config: ModelConfig, *, seed: int = 0, max_tokens: int = 32) -> Decoder:
    with torch.device("meta"):
        model = family.build(config, max_tokens=max_tokens)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for held in (*model.parameters(), *model.buffers()):
            held.fill_(float("nan"))
    model.init_weights(seed)
    return model


@pytest.mark.parametrize("name", TINY)
def test_first_weights_follow_from_the_seed_alone(name: str) -> None:
    one, same, other = born(preset(name)), born(preset(name)), born(preset(name), seed=1)
    for (key, weight), (_, again), (_, changed) in zip(
        one.named_parameters(), same.named_parameters(), other.named_parameters(), strict=True
    ):
        assert weight.isfinite().all(), key
        assert torch.equal(weight, again), key
        drawn = weight.ndim == 2
        assert torch.equal(weight, changed) is not drawn, key


@pytest.mark.parametrize("name", TINY)
def test_every_weight_gets_a_gradient(name: str) -> None:
    """A weight without one on some rank would bring FSDP's reduction out of step."""
    model = born(preset(name))
    model(torch.arange(8).view(1, 8)).square().mean().backward()
    assert [key for key, weight in model.named_parameters() if weight.grad is None] == []


def test_stacked_experts_start_like_dense_ones() -> None:
    model = born(preset("tiny-mixtral", width=128, ffn_width=256, layers=2))
    feed = model.blocks[0].feed
    assert isinstance(feed, MixtureOfExperts)
    for weight, std in ((feed.gate, 128**-0.5), (feed.up, 128**-0.5), (feed.down, 256**-0.5 / 2)):
        parts = weight.detach().chunk(4)
        assert not torch.equal(parts[0], parts[1])
        assert all(float(part.std()) == pytest.approx(std, rel=0.05) for part in parts)


def test_a_window_hides_what_is_before_it_and_nothing_else() -> None:
    """One layer: a change at position 3 is seen up to position 3 + window - 1."""
    model = born(preset("tiny-mistral", layers=1, sliding_window=4))
    tokens = torch.arange(16).view(1, 16)
    changed = tokens.clone()
    changed[0, 3] = 200
    differs = (model(tokens) != model(changed)).any(dim=-1)[0]
    assert differs.nonzero().flatten().tolist() == [3, 4, 5, 6]


def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    tokens = torch.arange(16).view(1, 16)
    windowed, plain = born(preset("tiny-mistral")), born(preset("tiny-mistral", sliding_window=None))
    assert torch.equal(windowed(tokens), plain(tokens))


def test_equal_experts_are_one_dense_feed_forward() -> None:
    """Routing must lose no token, count none twice and put each back in its place."""
    dense, mixed = born(preset("tiny-mixtral", experts=None)), born(preset("tiny-mixtral"))
    with torch.no_grad():
        for one, many in zip(dense.blocks, mixed.blocks, strict=True):
            for part in ("gate", "up", "down"):
                getattr(many.feed, part).copy_(getattr(one.feed, part).weight.repeat(4, 1))
    tokens = torch.randint(0, 256, (3, 32), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(dense(tokens), mixed(tokens), atol=1e-5)


def test_an_idle_expert_gets_a_gradient_of_zeros() -> None:
    model = born(preset("tiny-mixtral", layers=1, balance=0))
    feed = model.blocks[0].feed
    with torch.no_grad():
        feed.router.weight.zero_()  # all alike: the same two win every token
    model(torch.arange(8).view(1, 8)).square().mean().backward()
    busy = [bool(part.any()) for part in feed.gate.grad.chunk(4)]
    assert busy.count(True) == 2


def test_the_balance_gradient_is_that_of_its_loss() -> None:
    """It arrives beside the gradient of the output, and only while training."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64)

    def router_gradient(*, balance: float, training: bool = True) -> torch.Tensor:
        feed = born(preset("tiny-mixtral", balance=balance)).blocks[0].feed
        feed.train(training)(x).square().mean().backward()
        gradient: torch.Tensor = feed.router.weight.grad
        return gradient

    feed = born(preset("tiny-mixtral")).blocks[0].feed
    shares = feed.router(x).softmax(dim=-1)
    load = torch.zeros_like(shares).scatter(-1, shares.topk(2).indices, 1)
    (balance_loss(shares, load) * 0.02 / 2).backward()  # over two layers
    added = router_gradient(balance=0.02) - router_gradient(balance=0)
    assert torch.allclose(added, feed.router.weight.grad, atol=1e-7)
    assert float(feed.router.weight.grad.abs().max()) > 1e-5
    assert torch.equal(router_gradient(balance=0.02, training=False), router_gradient(balance=0))


def test_the_balance_loss_is_least_when_experts_are_used_alike() -> None:
    even = torch.full((1, 4, 4), 0.25)
    alike = torch.eye(4).view(1, 4, 4) + torch.eye(4).roll(1, 0).view(1, 4, 4)
    lopsided = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(1, 4, 4)
    assert float(balance_loss(even, alike)) == 2.0  # experts per token
    assert float(balance_loss(lopsided, 2 * lopsided)) == 4.0


def test_the_balance_loss_does_not_depend_on_how_a_batch_is_divided() -> None:
    shares = torch.rand(4, 8, 4, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    load = torch.zeros_like(shares).scatter(-1, shares.topk(2).indices, 1)
    halves = [balance_loss(part, chosen) for part, chosen in zip(shares.chunk(2), load.chunk(2), strict=True)]
    assert float(balance_loss(shares, load)) == pytest.approx(float(sum(halves) / 2))


def test_operations_count_only_what_a_token_passes_through() -> None:
    config = preset("mixtral-8x7b")
    total = sum(map(prod, family.weight_shapes(config).values()))
    lookup = 32_000 * 4096
    assert family.of(config).active_parameters(config) == total - 32 * 6 * 3 * 4096 * 14_336
    flops = family.of(config).flops_per_token(config, sequence_tokens=4096)
    assert flops == 6 * (12_879_925_248 - lookup) + 12 * 32 * 4096 * 4096


def test_attention_counts_the_heads_width_and_stops_at_the_window() -> None:
    qwen = preset("qwen3-0.6b")  # 16 heads of 128 on a stream of 1024
    assert attention_flops(qwen, 100) == 12 * 28 * 2048 * 100
    mistral = preset("mistral-7b", tied=True)
    at_window = attention_flops(mistral, 4096)
    assert attention_flops(mistral, 8192) == at_window
    assert attention_flops(mistral, 2048) == at_window // 2


def attention_flops(config: ModelConfig, tokens: int) -> int:
    """Operations that depend on the length of the sequence."""
    count = family.of(config).flops_per_token
    return count(config, sequence_tokens=tokens) - count(config, sequence_tokens=0)
