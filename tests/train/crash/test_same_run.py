"""A resumed run is the run it resumes: 50 steps to the last bit, and the same samples on four ranks, two and three."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainmaster.train.drill import judge
from trainmaster.train.drill.record import Attempt

from ..runs import tiny
from . import cases
from .oracle import Life
from .warm import Warm

# A learning rate that does not look at the number of steps: a run of 3 steps is then the beginning of one of 6.
FLAT = {"min_lr_ratio": 1.0, "warmup_steps": 1}


def lines(attempt_folder: Path) -> dict[str, list[dict[str, Any]]]:
    files = sorted((attempt_folder / "samples").iterdir())
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_as_many_ranks_go_on_bit_equal_for_50_steps(warm: Warm, tmp_path: Path) -> None:
    config = tiny(
        model=cases.MODEL, steps=57, epoch_steps=20, batch_sequences=4, eval_sequences=4, sequence_tokens=16,
        checkpoint={"every_steps": 5},
    )  # fmt: skip
    unbroken = Life(tmp_path / "unbroken", warm, config, 2)
    whole = unbroken.attempt()
    assert whole.codes == (0, 0)
    broken = Life(tmp_path / "broken", warm, config, 2)
    assert -9 in broken.attempt(TRAINMASTER_KILL_AT="step:backward @8", TRAINMASTER_KILL_RANK="1").codes
    resumed = broken.attempt()
    assert resumed.codes == (0, 0)
    assert resumed.resumed_from == 5
    after = {step: loss for step, loss in whole.losses.items() if step > 5}
    assert resumed.losses == after  # to the last bit
    assert len(after) == 52
    assert resumed.named("EVAL_MODEL", "metrics") == whole.named("EVAL_MODEL", "metrics")
    # Each rank was given the same rows from the same place on, and drew the same random numbers.
    first, second = lines(tmp_path / "unbroken" / "attempt-1"), lines(tmp_path / "broken" / "attempt-2")
    assert second == {rank: found[5:] for rank, found in first.items()}


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_four_ranks_then_two_then_three_consume_the_same_samples(warm: Warm, tmp_path: Path) -> None:
    def live(name: str, *plan: tuple[int, int]) -> list[Attempt]:
        life = None
        for ranks, steps in plan:
            config = tiny(
                model=cases.MODEL, steps=steps, batch_sequences=12, eval_sequences=0, sequence_tokens=64, optimizer=FLAT
            )
            attempts = life.attempts if life else []
            life = Life(tmp_path / name, warm, config, ranks)
            life.attempts = attempts
            assert set(life.attempt().codes) == {0}
        assert life is not None
        return life.attempts

    (unbroken,) = live("unbroken", (1, 9))
    moved = live("moved", (4, 3), (2, 6), (3, 9))
    assert [attempt.resumed_from for attempt in moved] == [None, 3, 6]
    together = [item for attempt in moved for item in judge.flatten(attempt.samples, 0, 9)]
    assert together == judge.flatten(unbroken.samples, 0, 9)  # the set and the order
    assert [number for number, _ in together] == list(range(9 * 12))
    assert len({digest for _, digest in together}) == 9 * 12  # each row is another one
    losses = {step: loss for attempt in moved for step, loss in attempt.losses.items()}
    assert losses == pytest.approx(unbroken.losses, abs=1e-3)
