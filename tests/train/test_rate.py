"""Speed: only training time counts, and an unknown GPU has no MFU."""

from __future__ import annotations

import pytest

from trainmaster.train.rate import Meter, peak_flops


def test_only_steps_count() -> None:
    clock = [0.0]
    meter = Meter(flops_per_token=100, peak=1000.0, devices=2, now=lambda: clock[0])
    meter.resume()
    clock[0] = 2.0
    meter.count(10)
    meter.pause()
    clock[0] = 50.0  # an evaluation
    meter.resume()
    clock[0] = 52.0
    meter.count(10)
    reading = meter.read()
    assert (reading.tokens_per_s, reading.step_s) == (5.0, 2.0)
    assert reading.mfu == pytest.approx(5.0 * 100 / 2000)
    clock[0] = 53.0
    meter.count(10)
    assert meter.read().tokens_per_s == 10.0
    assert meter.mean_tokens_per_s == pytest.approx(30 / 5)


def test_a_peak_is_known_or_it_is_not() -> None:
    assert peak_flops("NVIDIA H200", "bf16") == pytest.approx(989.5e12)
    assert peak_flops("NVIDIA H200 NVL", "bf16") is None
    assert peak_flops("NVIDIA H200", "fp32") is None
    assert peak_flops("cpu", "fp32") is None
    assert Meter(flops_per_token=1, peak=None, devices=8).read().mfu is None
