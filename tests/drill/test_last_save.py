"""A strike in the last save of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster.core.spec import JobSpec
from trainmaster.drill.lives import Timeline
from trainmaster.drill.plan import Strike
from trainmaster.drill.record import Attempt, Setup
from trainmaster.drill.run import CommandDrill

from .test_drill_parts import SHAPE, attempt
from .test_judge import REFERENCE, line


@pytest.mark.parametrize(("code", "labels"), [(-9, 2), (0, 1)])
def test_a_run_that_is_killed_in_its_last_save_is_started_again(
    code: int, labels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had done every step, was taken to be over, and its resume was never seen."""
    (tmp_path / "struck").mkdir()
    drill = CommandDrill(Setup(spec=JobSpec(name="x", command=("true",))), tmp_path)
    hit = attempt(*REFERENCE.values(), codes=(code,), struck=True)
    begun: list[str] = []

    def start(_self: CommandDrill, _run: str, label: str, **_: object) -> Attempt:
        begun.append(label)
        return hit if len(begun) == 1 else attempt(line(36, at=50.0), codes=(-9,))

    monkeypatch.setattr(CommandDrill, "_attempt", start)
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    drill._branch(Strike(name="saving", after=0), timeline, replace(SHAPE, world=1))
    assert len(begun) == labels, begun
    (one,) = drill._struck
    assert bool(one.resumes) == (labels == 2)
