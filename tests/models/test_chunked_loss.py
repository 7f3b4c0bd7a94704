"""The loss in chunks is cross-entropy: the same value, the same gradients, whatever the chunk and the head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import family, loss


def drawn(tokens: int = 600) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, 16, generator=generator, requires_grad=True)
    head = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (2, tokens // 2), generator=generator)
    targets[0, :7] = loss.NOT_COUNTED
    targets[1, -1] = loss.NOT_COUNTED
    return hidden, head, targets


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])  # three chunks of at most 256 tokens; one
def test_value_and_gradients_are_those_of_plain_cross_entropy(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_CHUNK_BYTES", chunk_bytes)
    hidden, head, targets = drawn()
    (loss.sum_of_losses(hidden, head, targets) * 0.25).backward()
    again, head_again, _ = drawn()
    logits = F.linear(again, head_again).flatten(0, 1)
    plain = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    (plain * 0.25).backward()
    torch.testing.assert_close(loss.sum_of_losses(hidden, head, targets), plain)
    torch.testing.assert_close(hidden.grad, again.grad)
    torch.testing.assert_close(head.grad, head_again.grad, atol=1e-5, rtol=1e-5)
    assert hidden.grad is not None
    assert not hidden.grad[0, :7].any()


def test_nothing_counted_is_zero_and_moves_nothing() -> None:
    hidden, head, targets = drawn()
    total = loss.sum_of_losses(hidden, head, torch.full_like(targets, loss.NOT_COUNTED))
    total.backward()
    assert float(total.detach()) == 0.0
    assert not hidden.grad.any()  # type: ignore[union-attr]
    assert not head.grad.any()  # type: ignore[union-attr]


def test_without_gradients_it_keeps_none() -> None:
    hidden, head, targets = drawn()
    with torch.no_grad():
        total = loss.sum_of_losses(hidden, head, targets)
    assert total.grad_fn is None
    torch.testing.assert_close(total, loss.sum_of_losses(hidden, head, targets).detach())


def test_a_huge_logit_stays_finite() -> None:
    hidden = torch.full((1, 2, 4), 1e4, requires_grad=True)
    head = torch.eye(4)
    assert loss.sum_of_losses(hidden, head, torch.tensor([[0, 1]])).isfinite()


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_gives_the_loss_of_its_logits(tied: bool) -> None:
    config = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, ffn_width=64, vocab=50, tied=tied)
    one, other = family.build(config, max_tokens=16), family.build(config, max_tokens=16)
    for model in (one, other):
        model.init_weights(1)
    tokens = torch.randint(0, 50, (3, 17), generator=torch.Generator().manual_seed(2))
    one(tokens[:, :-1], targets=tokens[:, 1:]).backward()
    F.cross_entropy(other(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    for (name, mine), (_, plain) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, atol=1e-4, rtol=1e-4, msg=name)
