"""Numbers far outside of sense: named as faults at once, neither a crash nor a search that does not end."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.core.config.parallel import largest_divisor
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import SpecError
from trainmaster.core.schema import build

HUGE = 10**12


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"steps": 10**400}, "steps"),
        ({"optimizer": {"lr": 10**400}}, "optimizer.lr"),
        ({"optimizer": {"weight_decay": 1e308}}, "optimizer.weight_decay"),
        ({"model": {"width": HUGE, "heads": 3}}, "model.width"),
        ({"model": {"kv_heads": HUGE}}, "model.kv_heads"),
        ({"model": {"layers": HUGE}}, "model.layers"),
        ({"batch_sequences": HUGE}, "batch_sequences"),
        ({"timeouts": {"step_s": 1e14}}, "timeouts.step_s"),
        ({"checkpoint": {"lease_s": 1e14}}, "checkpoint.lease_s"),
        ({"checkpoint": {"lease_s": 1e-300}}, "checkpoint.lease_s"),
        ({"checkpoint": {"retry_s": 1e300}}, "checkpoint.retry_s"),
        ({"data": {"wait_s": 1e14}}, "data.wait_s"),
    ],
)
def test_a_number_far_outside_of_sense_is_a_fault_by_name(config: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refused:
        build(TrainConfig, config)
    assert path in [fault.path for fault in refused.value.faults]
    assert len(str(refused.value)) < 1000


def test_advice_about_divisors_does_not_count_up_to_the_number() -> None:
    config = build(TrainConfig, {"batch_sequences": 14, "micro_sequences": HUGE})
    assert [fault.message for fault in config.faults_on(2)] == [
        f"{HUGE} does not divide the 7 sequences of each rank; use 7"
    ]
    hybrid = build(TrainConfig, {"parallel": {"sharding": "hybrid", "shard_ranks": HUGE}})
    assert [fault.path for fault in hybrid.faults_on(2)] == ["parallel.shard_ranks"]


@pytest.mark.parametrize(("number", "most"), [(1, 1), (12, 5), (12, 12), (13, 12), (36, 17), (97, 96), (2**31 - 1, 5)])
def test_the_largest_divisor(number: int, most: int) -> None:
    wanted = max(n for n in range(1, min(number, most) + 1) if number % n == 0)
    assert largest_divisor(number, most=most) == wanted


def test_the_name_of_an_unknown_field_is_shown_without_control_characters() -> None:
    with pytest.raises(SpecError) as refused:
        build(TrainConfig, {"\x1b[31m\u202e": 1, "x" * 5000: 2})
    assert str(refused.value).isascii() or "\u202e" not in str(refused.value)
    assert "\x1b" not in str(refused.value)
    assert "x" * 100 not in str(refused.value)
