"""Losses that a program prints: which of them can be compared with the undisturbed run's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster.core.results import Finding, Verdict
from trainmaster.drill.readings import read_losses

from .test_drill_parts import lines_of, proof_of

RIGHT = {step: 1.0 / step for step in range(11, 41)}


def judged(printed: dict[int, float], last: int = 40) -> Finding:
    proof = proof_of(lines_of(11, last), printed=printed)
    return next(result.findings[0] for result in proof.results if result.check == "losses")


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([38, 39, 40, 25], [38, 39, 40]),  # `trained from step 25, final loss 0.17`
        ([38, 39, 40, 15, 15], [38, 39, 40]),
        ([0, 15, 15], [0, 15]),
        ([1, 2, 1, 2], [1, 2]),
        ([4, 4], [4]),
        ([], []),
    ],
)
def test_a_last_line_that_names_an_earlier_step_has_no_loss_of_it(
    steps: list[int], kept: list[int], tmp_path: Path
) -> None:
    """A right script failed that said at its end from which step its process had gone on."""
    events = tmp_path / "events.jsonl"
    lines = [{"phase": "STEP", "data": {"step": step, "loss": at / 10}} for at, step in enumerate(steps)]
    events.write_text("\n".join(json.dumps(line) for line in lines))
    assert sorted(read_losses(events)[0]) == kept


@pytest.mark.parametrize("beside", [-1, 1])
def test_the_last_line_of_a_progress_bar_may_show_the_loss_beside_it(beside: int) -> None:
    """tqdm prints a step with the loss of the one before until it is given its own; a kill came in between."""
    lag = {step: loss for step, loss in RIGHT.items() if step < 20} | {20: 1.0 / (20 + beside)}
    finding = judged(lag)
    assert (finding.verdict, finding.reason[:9]) == (Verdict.PASS, "9 losses,"), finding.reason


@pytest.mark.parametrize(
    "printed",
    [
        {step: 1.0 / (step - 1) for step in range(11, 41)},  # every step
        RIGHT | {20: 1.0 / 19},  # not the last one
        RIGHT | {40: 0.5},  # another loss
    ],
)
def test_other_losses_than_the_undisturbed_runs_are_told(printed: dict[int, float]) -> None:
    assert judged(printed).verdict is Verdict.WARN
    moved = [replace(line, weights="x") if line.at == 40 else line for line in lines_of(11, 40)]
    proof = proof_of(moved, printed=printed)
    assert next(r.findings[0] for r in proof.results if r.check == "losses").verdict is Verdict.FAIL
