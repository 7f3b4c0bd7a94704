"""A step of the wall clock is no duration: neither a deadline nor a cap sees it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from trainmaster.control.clock import Clock
from trainmaster.core.cost import Span, add_up


class Machine:
    """Two clocks: the wall clock can be set, the steady one only runs."""

    def __init__(self) -> None:
        self.steady_s, self.set_s = 1_000.0, 1_700_000_000.0

    def wall(self) -> float:
        return self.set_s + self.steady_s

    def steady(self) -> float:
        return self.steady_s

    def clock(self, home: Path | None = None, *, boot: str = "one") -> Clock:
        return Clock(home, wall=self.wall, steady=self.steady, boot=boot)


@pytest.mark.parametrize("step_s", [7_200.0, -7_200.0])
def test_a_step_inside_a_duration_does_not_count(step_s: float) -> None:
    machine = Machine()
    clock = machine.clock()
    since = clock.now() - timedelta(seconds=30)
    machine.steady_s += 30
    machine.set_s += step_s
    now = clock.now()
    assert clock.elapsed_s(since, now) == pytest.approx(60)
    later = clock.now()
    machine.steady_s += 10
    assert clock.elapsed_s(later, clock.now()) == pytest.approx(10), "what begins behind the step is not touched"


def test_a_small_difference_is_no_step() -> None:
    machine = Machine()
    clock = machine.clock()
    since = clock.now()
    machine.set_s += 2
    assert clock.elapsed_s(since, clock.now()) == pytest.approx(2)


def test_a_step_while_no_server_ran_is_found_at_the_next_start(tmp_path: Path) -> None:
    machine = Machine()
    since = machine.clock(tmp_path).now()
    machine.steady_s += 100
    machine.set_s += 3_600
    again = machine.clock(tmp_path)
    assert again.elapsed_s(since, again.now()) == pytest.approx(100)
    third = machine.clock(tmp_path)
    assert third.elapsed_s(since, third.now()) == pytest.approx(100)


def test_after_a_reboot_the_old_offset_means_nothing(tmp_path: Path) -> None:
    machine = Machine()
    since = machine.clock(tmp_path).now()
    machine.set_s += machine.steady_s + 500
    machine.steady_s = 5.0
    clock = machine.clock(tmp_path, boot="two")
    assert clock.elapsed_s(since, clock.now()) == pytest.approx(505)


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "clock.json").write_text("{")
    Machine().clock(tmp_path)
    assert '"steps": []' in (tmp_path / "clock.json").read_text()


def test_money_is_counted_for_the_time_that_passed() -> None:
    machine = Machine()
    clock = machine.clock()
    span = Span(cents_per_hour=100.0, start=clock.now())
    machine.steady_s += 3_600
    machine.set_s += 100 * 3_600
    now = clock.now()
    assert add_up([clock.correct(span, now=now)], now=now).known_cents == pytest.approx(100)
    assert add_up([span], now=now).known_cents == pytest.approx(10_100)
