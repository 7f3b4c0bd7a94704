"""Which saves are due, by the config and by a bound; a clock of our own."""

from __future__ import annotations

from typing import Any

from trainmaster.core.config.checkpoint import CheckpointConfig
from trainmaster.core.schema import build
from trainmaster.train.checkpoint.tiers.cadence import Cadence
from trainmaster.train.checkpoint.tiers.loss_bound import DISK, MEMORY, REMOTE


class Run:
    """A run of one-second steps whose saves take as long as is said."""

    def __init__(self, tiers: list[str], took: dict[str, float], **config: Any) -> None:
        self.now, self.took, self.begun = 0.0, took, dict[int, set[str]]()
        checkpoint = build(CheckpointConfig, {"every_steps": 50, **config})
        self.pace = Cadence(checkpoint, tiers, replicated=True, clock=lambda: self.now)
        self.pace.start(0)

    def go(self, first: int, last: int) -> dict[int, set[str]]:
        """The saves that begin at these steps."""
        begun = {}
        for step in range(first, last + 1):
            self.now += 1.0
            self.pace.tick()
            if self.pace.due(step):
                begun[step] = self.pace.begin(step, all_tiers=False)
                for tier in begun[step]:
                    self.pace.took(tier, self.took[tier])
                found = self.pace.reckon()
                if found is not None:
                    self.pace.adopt(found)
        return begun


def test_without_a_bound_the_config_says_when() -> None:
    run = Run([MEMORY, DISK, REMOTE], {MEMORY: 1, DISK: 4, REMOTE: 9}, memory={"every_steps": 20}, remote="/far")
    begun = run.go(1, 100)
    assert list(begun) == [20, 40, 50, 60, 80, 100]
    assert begun[20] == {MEMORY}
    assert begun[50] == {MEMORY, DISK, REMOTE}  # the remote tier takes each save on disk
    bound = run.pace.bound
    assert bound is not None
    assert bound.limit_steps is None
    assert bound.missed is None


def test_a_bound_sets_the_intervals_once_times_are_known() -> None:
    run = Run([DISK], {DISK: 4.0}, max_lost_steps=30)
    begun = run.go(1, 100)
    # The first save measures. Then a save takes 5 steps with its slack: 25 apart, at most 30 are lost.
    assert list(begun) == [2, 4, 25, 50, 75, 100]
    bound = run.pace.bound
    assert bound is not None
    assert bound.losses["node"].lost_steps == bound.limit_steps == 30
    assert run.pace.every_steps == 25


def test_slower_saves_shorten_the_interval_and_then_miss_the_bound() -> None:
    run = Run([DISK], {DISK: 4.0}, max_lost_minutes=0.5)
    run.go(1, 100)
    assert run.pace.every_steps == 24  # 29 steps and the one under way are half a minute
    run.took[DISK] = 8.0
    run.go(101, 150)
    assert run.pace.every_steps == 19
    assert run.pace.bound is not None
    assert run.pace.bound.missed is None
    run.took[DISK] = 20.0
    run.go(151, 200)
    assert run.pace.bound.missed is not None
    assert "a save to disk takes 20 s" in run.pace.bound.missed


def test_what_memory_holds_the_disk_does_as_well_as_it_can() -> None:
    run = Run([MEMORY, DISK], {MEMORY: 1.0, DISK: 40.0}, max_lost_steps=10)
    run.go(1, 300)
    bound = run.pace.bound
    assert bound is not None
    assert bound.losses["node"].tier == MEMORY
    assert bound.losses["node"].lost_steps == 10
    assert bound.missed is None
    assert bound.every_steps == {MEMORY: 8, DISK: 56}  # 50 steps a save with its slack, in whole intervals of memory
    lost = bound.losses["cluster"].lost_steps
    assert lost is not None
    assert lost > 100


def test_a_resumed_run_counts_from_where_it_is() -> None:
    run = Run([DISK], {DISK: 1.0})
    run.pace.start(70)
    assert list(run.go(71, 160)) == [100, 150]


def test_an_evaluation_is_a_pause_and_no_step() -> None:
    run = Run([DISK], {DISK: 1.0})
    run.go(1, 20)
    run.now += 60
    run.go(21, 50)
    bound = run.pace.bound
    assert bound is not None
    assert bound.step_s == 1.0
    assert bound.losses["node"].lost_s == 53 + 1 + 60
