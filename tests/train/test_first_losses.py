"""With the default rate and warm-up the loss of a wide model falls from its first steps on."""

from __future__ import annotations

import pytest
import torch

from trainmaster.core.config.schedule import learning_rate
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.schema import build
from trainmaster.datasets.tales import Tales
from trainmaster.models import family
from trainmaster.train.optimizer import build_optimizer, update


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_of_a_wide_model_never_rises_above_its_first(seed: int) -> None:
    losses = _first_losses(seed, steps=5)
    assert max(losses) == losses[0], losses
    assert losses[-1] < losses[0] - 1, losses


def _first_losses(seed: int, *, steps: int) -> list[float]:
    model = {"width": 384, "layers": 12, "heads": 6, "kv_heads": 1, "ffn_width": 1344, "tied": True}
    config = build(TrainConfig, {"model": model, "steps": 30, "sequence_tokens": 32, "seed": seed})
    llama = family.build(config.model, max_tokens=32)
    llama.init_weights(seed)
    optimizer = build_optimizer(llama, config.optimizer)
    tales = Tales(seed=0, sequence_tokens=32)
    losses = []
    for step in range(steps):
        rows = tales.rows([step])
        loss: torch.Tensor = llama(rows.tokens, targets=rows.targets) / 32
        loss.backward()  # type: ignore[no-untyped-call]
        lr = learning_rate(config.optimizer, step=step, steps=config.steps)
        update(llama, optimizer, loss=loss.detach(), lr=lr, grad_clip=config.optimizer.grad_clip)
        losses.append(float(loss.detach()))
    return losses
