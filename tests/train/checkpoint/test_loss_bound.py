"""The loss bound: what is stated is never less than what a run can lose, and a limit that can be held is held."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmaster.train.checkpoint.checkpointing import Checkpointing
from trainmaster.train.checkpoint.protocol import Ended, Failed, Saved
from trainmaster.train.checkpoint.tiers.loss_bound import (
    DISK,
    MEMORY,
    REMOTE,
    SLACK,
    Bound,
    Tier,
    bound_of,
    derive,
    lost_steps,
    settle,
    steps_in,
)

NAMES = (MEMORY, DISK, REMOTE)
BUSY = st.floats(0.001, 30)
EVERY = st.integers(1, 60)
STEP_S = st.floats(0.1, 5)


def tier(name: str, every: int, busy_s: float, *, replicated: bool = True) -> Tier:
    return Tier(name=name, every_steps=every, busy_s=busy_s, replicated=replicated)


def lose_most(tiers: list[Tier], step_s: float, seed: int, steps: int = 400) -> dict[str, int]:
    """Live through a run by the rules in bound.py, with saves that take their slowest time or less.

    Returns the most finished steps that each tier was behind right before a commit.
    """
    draw = random.Random(seed)
    begun = [0] * len(tiers)
    committed, worst = list(begun), list(begun)
    meant: dict[int, set[int]] = {}  # step → the tiers it goes to
    waiting: list[int | None] = [None] * len(tiers)
    under_way: list[tuple[float, int] | None] = [None] * len(tiers)
    for step in range(1, steps):
        for index, one in enumerate(tiers):
            job = under_way[index]
            if job is not None and job[0] <= step * step_s:
                worst[index] = max(worst[index], int(job[0] / step_s) - committed[index])
                committed[index], under_way[index] = job[1], None
                if index + 1 in meant[job[1]]:
                    # What it replaces was on its way to a farther tier perhaps: then so is this.
                    meant[job[1]] |= meant.get(waiting[index + 1] or 0, set())
                    waiting[index + 1] = job[1]
            if under_way[index] is not None:
                continue
            if index == 0:
                due = {other for other, t in enumerate(tiers) if step // t.every_steps > begun[other] // t.every_steps}
                if due:
                    # To get to the last of them it passes through those before it.
                    meant[step] = set(range(max(due) + 1))
                    begun = [step if other in meant[step] else last for other, last in enumerate(begun)]
                    waiting[0] = step
            chosen = waiting[index]
            if chosen is not None:
                slow = draw.choice((1.0, draw.uniform(0.3, 1)))
                under_way[index], waiting[index] = (step * step_s + one.busy_s * slow, chosen), None
    return {t.name: lost for t, lost in zip(tiers, worst, strict=True)}


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(EVERY, BUSY), min_size=1, max_size=3), STEP_S, st.integers(0, 99))
def test_no_run_loses_more_than_its_bound(rows: list[tuple[int, float]], step_s: float, seed: int) -> None:
    tiers = settle([tier(NAMES[index], every, busy) for index, (every, busy) in enumerate(rows)])
    lived = lose_most(tiers, step_s, seed)
    for one, most in zip(tiers, lost_steps(tiers, step_s), strict=True):
        assert lived[one.name] <= most


@settings(deadline=None)
@given(st.lists(BUSY, min_size=1, max_size=3), STEP_S, st.integers(1, 500))
def test_a_limit_that_can_be_held_is_held(busy: list[float], step_s: float, limit: int) -> None:
    tiers = [tier(NAMES[index], 1, seconds) for index, seconds in enumerate(busy)]
    derived = derive(tiers, step_s=step_s, limit_steps=limit)
    held = bound_of(derived, step_s=step_s, limit_steps=limit)
    lost = held.losses["process"].lost_steps
    assert lost is not None
    assert (held.missed is None) == (lost <= limit)
    behind = math.ceil(busy[0] * SLACK / step_s)
    assert (held.missed is None) == (limit >= 2 * behind)
    if held.missed is None and len(busy) == 1:
        assert lost == limit  # and saved no oftener than needed
    for before, after in itertools.pairwise(derived):
        assert after.every_steps % before.every_steps == 0


def test_each_kind_of_loss_has_its_tier() -> None:
    tiers = [tier(MEMORY, 10, 2.0), tier(DISK, 50, 20.0), tier(REMOTE, 100, 60.0)]
    bound = bound_of(tiers, step_s=1.0)
    costs = {kind: (held.tier, held.lost_steps) for kind, held in bound.losses.items()}
    # Memory: 10 steps apart and 3 late; the disk 50 apart and 3 + 25 late; the store 100 apart and 3 + 25 + 75 late,
    # and 75 more because the copy before may still be under way when this one comes.
    assert costs == {
        "process": (MEMORY, 13), "node": (MEMORY, 13), "cluster": (DISK, 78), "disk": (REMOTE, 278),
    }  # fmt: skip
    assert bound.losses["cluster"].lost_s == 79.0
    assert bound.event()["lost_steps"] == 13
    assert bound.missed is None
    assert bound.lines() == [
        "a crash or losing a node costs at most 13 steps (14 s, from memory); "
        "losing all nodes and their memory costs at most 78 steps (79 s, from disk); "
        "losing the disk costs at most 278 steps (4.7 min, from remote); "
        "saved to memory every 10 steps, disk every 50 steps, remote every 100 steps"
    ]


def test_memory_without_a_second_node_does_not_outlive_its_own() -> None:
    bound = bound_of([tier(MEMORY, 5, 1.0, replicated=False), tier(DISK, 50, 10.0)], step_s=1.0)
    assert bound.losses["process"].tier == MEMORY
    assert bound.losses["node"].tier == DISK
    assert bound.losses["disk"].tier is None
    assert bound.lines()[0].partition("; saved to ")[0].endswith("losing the disk costs the whole run")


def missed(limit: int) -> Bound:
    tiers = [tier(DISK, 50, 8.0)]
    return bound_of(derive(tiers, step_s=1.0, limit_steps=limit), step_s=1.0, limit_steps=limit)


def test_a_limit_that_cannot_be_held_is_said_with_what_would() -> None:
    assert missed(20).missed is None
    assert missed(20).losses["node"].lost_steps == 20
    short = missed(19)
    assert short.missed is not None
    assert short.losses["node"].lost_steps == 20
    assert "20 steps, and 19 were asked for" in short.missed
    assert "20 steps can be held, or 19 with saves of at most 7.6 s" in short.missed
    assert short.event()["missed"] == short.missed


@pytest.mark.parametrize(("minutes", "step_s", "steps"), [(1.0, 1.0, 59), (1.0, 50.0, 1), (10.0, 0.5, 1199)])
def test_minutes_become_steps(minutes: float, step_s: float, steps: int) -> None:
    assert steps_in(minutes, step_s=step_s) == steps


def test_a_bound_is_withdrawn_while_saves_fail_and_stated_again_after_one_that_is_kept() -> None:
    stated: list[dict[str, Any]] = []
    bound = bound_of([tier(DISK, 10, 1.0)], step_s=1.0)

    class Saves:
        """Checkpoints whose saves end as the test says."""

        ended: ClassVar[list[Ended]] = []

        def __init__(self) -> None:
            self.bound, self.held = bound, list[int]()

        def collect_finished(self) -> list[Ended]:
            return self.ended

        def hold(self, least: int) -> list[Ended]:
            self.held.append(least)
            return []

    log = SimpleNamespace(
        loss_bounded=lambda data, _lines: stated.append(data),
        checkpoint_saved=lambda **_: None,
        checkpoint_failed=lambda **_: None,
    )
    saves = Saves()
    run = Checkpointing(saves, log)  # type: ignore[arg-type]
    saved = Saved(step=10, path="p", size_bytes=1, seconds=1.0, tier=DISK)
    for saves.ended in ([saved], [Failed(step=20, why="No space left", tier=DISK)], [], [saved]):  # type: ignore[misc]
        run.report_ended()
        run.hold_bound(25)
    assert [(data["lost_steps"], data["withdrawn"]) for data in stated] == [
        (12, None), (None, "saves to disk fail: No space left"), (12, None)
    ]  # fmt: skip
    assert len(saves.held) == 2, "a step waits for a save only while there is a promise"
    lines = bound.without({DISK: "No space left"}).lines()
    assert "all since the last save that was kept in disk" in lines[0] and "does not hold" in lines[1]
    assert bound.without({REMOTE: "down"}) is bound, "a tier that nothing rests on"
