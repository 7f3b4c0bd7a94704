"""A strike in the last save of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster.core.spec import JobSpec
from trainmaster.drill.copies import Copies
from trainmaster.drill.lives import Timeline
from trainmaster.drill.plan import Strike
from trainmaster.drill.record import Attempt, Setup
from trainmaster.drill.starts import Starts

from .test_drill_parts import SHAPE, attempt
from .test_judge import REFERENCE, line


@pytest.mark.parametrize(("code", "labels"), [(-9, 2), (0, 1)])
def test_a_run_that_is_killed_in_its_last_save_is_started_again(
    code: int, labels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had done every step, was taken to be over, and its resume was never seen."""
    (tmp_path / "struck").mkdir()
    starts = Starts(Setup(spec=JobSpec(name="x", command=("true",))), tmp_path, struck_since=0.0)
    hit = attempt(*REFERENCE.values(), codes=(code,), struck=True)
    begun: list[str] = []

    def start(_self: Starts, _run: str, label: str, **_: object) -> Attempt:
        begun.append(label)
        return hit if len(begun) == 1 else attempt(line(36, at=50.0), codes=(-9,))

    monkeypatch.setattr(Starts, "start", start)
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    one = Copies(starts, replace(SHAPE, world=1), tmp_path).strike(Strike(name="saving", after=0), timeline)
    assert len(begun) == labels, begun
    assert bool(one.resumes) == (labels == 2)
