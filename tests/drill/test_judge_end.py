"""Starts that count from another step than that of their state: named as the cause of what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainmaster.core.results import Verdict

from .test_drill_parts import proof_of
from .test_judge import line


@pytest.mark.parametrize(
    ("by", "printed", "says"),
    [
        (
            -1,
            True,
            "counted on from step 9, although its state is that after step 10, so 1 step was done a second time",
        ),
        (1, True, "counted on from step 11, although its state is that after step 10, so 1 step was left out"),
        (-1, False, "1 step done a second time for each of 1 starts"),
        (1, False, "1 step left out for each of 1 starts"),
    ],
)
def test_a_start_that_counts_from_another_step_is_the_cause_of_other_losses(by: int, printed: bool, says: str) -> None:
    """It does the work of step 10 again, or leaves out that of step 11, and ends one step late or early."""
    after = [replace(line(step), weights=f"x{step}", state=f"x{step}") for step in range(12, 41 - by)]
    losses = {step: 2.0 / step for step in range(11 + by, 41)}
    proof = proof_of([line(11), *after], printed=losses if printed else {20: 0.1, 40: 0.2})
    found = {result.check: result.findings[0] for result in proof.results}
    assert {name for name, one in found.items() if one.verdict is Verdict.FAIL} == {"losses", "end"}
    assert says in found["end"].reason and "range(done, steps)" in (found["end"].action or "")
    assert found["losses"].action == "it follows from: end"


def test_rates_and_data_of_a_start_that_counts_from_another_step_follow_from_it() -> None:
    """Both are taken from the number of the step."""
    off = [replace(line(step), rates=line(step - 1).rates, batches=line(step - 1).batches) for step in range(11, 42)]
    proof = proof_of(off, printed={step: 2.0 / step for step in range(10, 41)})
    found = {result.check: result.findings[0] for result in proof.results}
    assert {name for name, one in found.items() if one.verdict is Verdict.FAIL} == {"losses", "end"}
    assert "follows from the number of the step" in found["schedule"].reason
    assert "follows from the number of the step" in found["data"].reason
    assert found["losses"].action == "it follows from: end"


def test_a_batch_that_is_read_again_is_told_by_the_data_though_a_step_is_done_again() -> None:
    again = [replace(line(step), batches=line(step - 1).batches) for step in range(11, 42)]
    proof = proof_of(again, printed={step: 2.0 / step for step in range(11, 42)})
    found = {result.check: result.findings[0] for result in proof.results}
    assert "2 batches were read a second time" in found["data"].reason
    assert found["losses"].action == "it follows from: data"
