"""Learning rate and warm-up where a config states none: published, or by width and length; never a toy's rate."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.core.config import presets
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.schema import build, to_plain


def optimizer(**config: Any) -> Any:
    return build(TrainConfig, config).optimizer


@pytest.mark.parametrize(
    ("model", "lr"),
    [
        ({}, 3e-3),
        ({"width": 96}, 3e-3),
        ({"width": 2048, "heads": 16}, 6e-4),
        ({"width": 4096, "heads": 32, "kv_heads": 8}, 3e-4),
        ({"width": 8192, "heads": 64, "kv_heads": 8}, 1.5e-4),
        ({"width": 16384, "heads": 128, "kv_heads": 8}, 7.5e-5),
        ({"preset": "llama3.1-8b"}, 3e-4),
        ({"preset": "llama2-13b"}, 3e-4),
        ({"preset": "llama2-70b"}, 1.5e-4),
        ({"preset": "llama3.2-1b"}, 6e-4),
        ({"preset": "llama2-13b", "width": 2560, "heads": 20, "kv_heads": 20}, 4.8e-4),
    ],
)
def test_an_unstated_rate_is_published_or_follows_the_width(model: dict[str, Any], lr: float) -> None:
    assert optimizer(model=model).lr == lr
    assert optimizer(model=model, optimizer={"lr": 1e-5}).lr == 1e-5


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (2, 1), (10, 5), (11, 10), (200, 10), (1000, 20), (60_000, 1200), (10**6, 2000)]
)
def test_an_unstated_warmup_follows_the_length_and_ends_before_it(steps: int, warmup: int) -> None:
    found = optimizer(steps=steps)
    assert found.warmup_steps == warmup < steps
    assert optimizer(steps=steps, optimizer={"warmup_steps": 0}).warmup_steps == 0


def test_what_was_filled_in_is_stated_from_then_on() -> None:
    config = build(TrainConfig, {"model": {"preset": "llama3.1-8b"}, "steps": 60_000})
    assert build(TrainConfig, to_plain(config)) == config
    assert build(TrainConfig, {**to_plain(config), "steps": 30_000}).optimizer == config.optimizer


def test_a_published_rate_has_its_source() -> None:
    found = {name: presets.find(name) for name in presets.names()}
    assert {name for name, preset in found.items() if preset.lr} >= {"llama2-7b", "llama3.1-8b", "llama3.1-70b"}
    assert all((preset.lr is None) == (preset.lr_source is None) for preset in found.values())
