"""Speed: only training time counts, and an unknown GPU has no MFU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from trainmaster.train import loop
from trainmaster.train.metrics.async_scalars import PendingScalars, StepClock
from trainmaster.train.metrics.rate import Meter, peak_flops, thread_busy_s

from .runs import RunHere, tiny


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


def test_the_last_step_is_timed_by_its_end_not_by_when_it_was_read() -> None:
    """A GPU: steps end at 1, 2, 3, … s. The host reads each while it starts the next, and the last one at once."""
    clock = [0.0]
    meter = Meter(flops_per_token=1, peak=None, devices=1, now=lambda: clock[0])
    meter.resume()
    speeds = []
    for end, read_at in ((1.0, 1.9), (2.0, 2.9), (3.0, 3.9), (4.0, 4.0)):
        clock[0] = read_at
        meter.count(100, at=end)
        speeds.append(meter.read().tokens_per_s)
    assert speeds == pytest.approx([100.0] * 4)
    assert meter.mean_tokens_per_s == pytest.approx(100.0)
    meter.pause()  # nothing of the time before is lost or counted twice
    clock[0] = 10.0
    meter.resume()
    clock[0] = 12.0
    meter.count(100, at=11.0)
    assert meter.read().tokens_per_s == pytest.approx(100.0)


class SteadyClock(StepClock):
    """A device whose steps each end 100 s after the one before, whenever the host reads them."""

    def completed(self, scalars: PendingScalars) -> float:
        self._at += 100.0
        return self._at


def test_a_run_tells_the_speed_of_its_steps_by_their_ends(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "StepClock", SteadyClock)
    config = tiny(steps=4, epoch_steps=4, eval_sequences=0, log_every_steps=1, checkpoint={"every_steps": 4})
    ran = run_here(tmp_path, config)
    told = [item["data"] for item in ran.named("STEP", "metrics")]
    speed = config.batch_sequences * config.sequence_tokens / 100
    assert [item["tokens_per_s"] for item in told] == pytest.approx([speed] * 4, abs=0.05), "the last one too"
    (ended,) = ran.named("TRAINING", "end")
    assert ended["data"]["tokens_per_s"] == pytest.approx(speed, abs=0.05)


def test_on_a_cpu_a_step_is_done_when_its_scalars_are_made() -> None:
    clock = StepClock(torch.device("cpu"))
    first, second = PendingScalars(torch.tensor(1.0)), PendingScalars(torch.tensor(2.0))
    assert (clock.completed(first), clock.completed(second)) == (first.made_at, second.made_at)
    assert first.made_at <= second.made_at


def test_a_peak_is_known_or_it_is_not() -> None:
    assert peak_flops("NVIDIA H200", "bf16") == 989e12
    assert peak_flops("NVIDIA H200 Super", "bf16") is None
    assert peak_flops("NVIDIA H200", "fp32") is None
    assert peak_flops("cpu", "fp32") is None
    assert Meter(flops_per_token=1, peak=None, devices=8).read().mfu is None


def test_the_time_of_a_step_is_shared_out() -> None:
    clock, busy = [0.0], [0.0]
    meter = Meter(flops_per_token=1, peak=None, devices=2, busy=lambda: busy[0], now=lambda: clock[0])
    meter.resume()
    meter.wait_for_data(1.0)
    clock[0], busy[0] = 10.0, 5.0  # five seconds of nine were its own
    meter.count(10)
    reading = meter.read()
    assert (reading.data_share, reading.compute_share, reading.comm_share) == pytest.approx((0.1, 0.5, 0.4))
    assert (reading.data_s, reading.compute_s) == (1.0, 5.0)


def test_what_cannot_be_told_apart_is_not() -> None:
    clock = [0.0]
    several = Meter(flops_per_token=1, peak=None, devices=2, now=lambda: clock[0])
    alone = Meter(flops_per_token=100, peak=1000.0, devices=1, measured=800.0, now=lambda: clock[0])
    clock[0] = 4.0
    for meter in (several, alone):
        meter.count(10)
    assert several.read().comm_share is None
    reading = alone.read()
    assert (reading.compute_share, reading.comm_share) == (1.0, 0.0)
    assert (reading.mfu, reading.mfu_measured) == pytest.approx((0.25, 250 / 800))


def test_this_thread_is_busy_while_it_computes_and_not_while_it_waits() -> None:
    before = thread_busy_s()
    assert before is not None
    total = sum(value * value for value in range(300_000))
    after = thread_busy_s()
    assert total > 0
    assert after is not None
    assert after > before
    time.sleep(0.3)
    slept = thread_busy_s()
    assert slept is not None
    assert slept - after < 0.25
