"""How long a drill still takes."""

from __future__ import annotations

from dataclasses import replace

from trainmaster.drill import plan
from trainmaster.drill.estimate import Estimate

from .test_drill_parts import SHAPE, attempt, lines_of


def test_the_rest_is_counted_in_starts_and_steps() -> None:
    estimate = Estimate()
    assert str(estimate) == "", "nothing is known yet"
    one = replace(attempt(*lines_of(1, 40)), begun=0.0, ended=50.0)  # a step a second
    estimate.take(one)
    assert str(estimate) == "", "nothing is planned yet"
    strikes = plan.make(replace(SHAPE, world=1, launcher=False, fewer=None), wanted=["one", "full", "stop"], seed=0)
    estimate.plan(strikes, 40)
    # Four starts of 10 s beside their steps: one, full, full again, the last one; 40 steps, and six in each copy.
    assert (estimate.starts, estimate.steps, str(estimate)) == (4, 52, " (about 92 s left in all)")
    estimate.take(replace(attempt(*lines_of(1, 20)), begun=0.0, ended=40.0))
    assert str(estimate) == " (about 77 s left in all)", "3 starts of 15 s, 32 steps"
    for _ in range(4):
        estimate.take(attempt())
    assert (estimate.starts, str(estimate)) == (0, "")
