"""How long a drill still takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainmaster.drill import plan
from trainmaster.drill.estimate import Estimate
from trainmaster.drill.plan import Strike

from .test_drill_parts import SHAPE, attempt, lines_of

ONE_RANK = replace(SHAPE, world=1, launcher=False, fewer=None)


def test_the_rest_is_counted_in_starts_and_steps() -> None:
    estimate = Estimate()
    assert str(estimate) == "", "nothing is known yet"
    one = replace(attempt(*lines_of(1, 40)), begun=0.0, ended=50.0)  # a step a second
    estimate.take(one)
    assert str(estimate) == "", "nothing is planned yet"
    strikes = plan.make(ONE_RANK, wanted=["one", "full", "stop"], seed=0)
    estimate.plan(strikes, ONE_RANK)
    # Four starts of 10 s beside their steps: one, full, full again, the last one; 40 steps, and six in each copy.
    assert (estimate.starts, estimate.steps, str(estimate)) == (4, 52, " (about 92 s left in all)")
    estimate.take(replace(attempt(*lines_of(1, 20)), begun=0.0, ended=40.0))
    assert str(estimate) == " (about 77 s left in all)", "3 starts of 15 s, 32 steps"
    for _ in range(4):
        estimate.take(attempt())
    assert (estimate.starts, str(estimate)) == (0, "")
    estimate.plan(strikes, ONE_RANK, undisturbed=1)
    assert (estimate.starts, estimate.steps) == (5, 92), "and 40 steps of one more start"
    estimate.leave_out(2)
    assert (estimate.starts, estimate.steps) == (3, 80), "nothing is there to be struck"


@pytest.mark.parametrize(
    ("keeps_one", "killed_in", "more"),
    [(False, 22, 0), (True, 22, 2), (False, 8, 2), (True, 8, 2), (True, 38, 0)],
    ids=["keeps more", "keeps one", "saved once", "both", "no save is left"],
)
def test_a_run_with_one_checkpoint_is_started_once_more_before_each_damage(
    keeps_one: bool, killed_in: int, more: int
) -> None:
    """Saves after 5, 10, …: it goes on to the second save from there, 10 steps, and is damaged then."""
    names = ("truncated", "flipped", "full")
    strikes = [Strike(name="one", after=killed_in, rank=0), *(Strike(name=name, after=0) for name in names)]
    estimate = Estimate()
    estimate.plan(strikes, replace(ONE_RANK, keeps_one=keeps_one))
    assert (estimate.starts, estimate.steps) == (6 + more, 40 + 4 * 6 + 10 * more)
