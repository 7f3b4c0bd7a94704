"""The learning rate over time, and which weights decay."""

from __future__ import annotations

import pytest

from trainmaster.core.config.schedule import learning_rate
from trainmaster.core.config.train import ModelConfig, OptimizerConfig
from trainmaster.models import family
from trainmaster.train.optimizer import build_optimizer


def test_the_rate_climbs_to_its_peak_and_falls_to_its_last_share() -> None:
    config = OptimizerConfig(lr=0.01, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(config, step=step, steps=20) for step in range(20)]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert max(rates) == rates[3] == pytest.approx(rates[4])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.001)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_short_runs_have_a_rate_too(warmup: int, steps: int) -> None:
    config = OptimizerConfig(lr=0.01, warmup_steps=warmup)
    assert all(0 < learning_rate(config, step=step, steps=steps) <= 0.01 for step in range(steps))


def test_matrices_decay_and_norms_do_not() -> None:
    model = family.build(ModelConfig(layers=1, width=32, heads=4, kv_heads=2, ffn_width=64), max_tokens=8)
    decaying, still = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3
    assert all(weight.ndim == 2 for weight in decaying["params"])
    assert still["weight_decay"] == 0.0
    assert [weight.ndim for weight in still["params"]] == [1, 1, 1]
