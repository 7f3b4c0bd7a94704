"""The comparison of rules: every rule runs every job on GPUs of its own, and only ours stops jobs."""

from __future__ import annotations

import random

import pytest

from queueing import compare
from queueing.compare import Outcome


def _run(rule: str) -> Outcome:
    jobs = compare.draw_jobs(random.Random(3), count=150, machines=2, load=1.0)
    return compare.simulate(rule, jobs, machines=2)


@pytest.mark.parametrize("rule", compare.RULES)
def test_every_job_runs_as_long_as_it_takes(rule: str) -> None:
    outcome = _run(rule)
    assert outcome.faults == []
    for job in outcome.jobs:
        held = job.ends_s - job.arrived_s - job.waited_s
        assert held == pytest.approx(job.run_s + job.lost_s, abs=1e-3)
    assert any(job.stops for job in outcome.jobs) == (rule == "ours")


def test_the_rules_differ_in_what_they_say_of_themselves() -> None:
    figures = {rule: compare.judge(rule, [_run(rule)]) for rule in compare.RULES}
    assert figures["skypilot"].waits_s == figures["fifo"].waits_s
    assert sum(figures["easy"].waits_s) < sum(figures["fifo"].waits_s), "back-fill uses what stands idle"
    assert max(figures["dstack"].large_s) > max(figures["easy"].large_s), "without a reservation large jobs starve"
    assert sum(figures["ours"].high_s) < sum(figures["easy"].high_s), "priorities count"
    assert "| ours |" in compare.render(list(figures.values()))
