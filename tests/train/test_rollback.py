"""Sick steps in a real run: skipped and told, and after a row of them the run goes back and on past their samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainmaster.models.decoder import Decoder
from trainmaster.train import loop
from trainmaster.train.feed import Batch, Feed
from trainmaster.train.watch.bad_steps import Diverged

from .runs import Ran, RunHere, StopAfter, tiny

Poison = Callable[..., None]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Make the loss of steps that touch these samples so many times what it is, or the weights before them."""
    take, compute = Feed.take, loop.forward_backward
    cursors: list[int] = []

    def noted(self: Feed, cursor: int) -> list[Batch]:
        cursors.append(cursor)
        return take(self, cursor)

    def spoil(samples: range, factor: float, *, weights: bool = False) -> None:
        def spoiled(model: Decoder, batches: list[Batch]) -> torch.Tensor:
            hit = cursors[-1] in samples
            if hit and weights:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(factor)
            loss = compute(model, batches)
            return loss * factor if hit and not weights else loss

        monkeypatch.setattr(Feed, "take", noted)
        monkeypatch.setattr(loop, "forward_backward", spoiled)

    return spoil


def skipped(ran: Ran) -> list[tuple[int, int, int]]:
    data = [item["data"] for item in ran.named("WATCH", "skipped")]
    return [(item["step"], item["first_sample"], item["last_sample"]) for item in data]


def test_a_sick_step_is_skipped_with_its_samples_and_the_run_goes_on(
    run_here: RunHere, tmp_path: Path, poison: Poison
) -> None:
    poison(range(24, 32), math.nan)
    ran = run_here(tmp_path, tiny())
    assert skipped(ran) == [(4, 24, 31)]
    assert ran.named("WATCH", "skipped")[0]["data"]["why"] == "loss is nan"
    assert [step for step, loss in ran.losses.items() if loss == "NaN"] == [4]
    assert not ran.named("WATCH", "rollback")
    # The save that was due inside the row came after it, and nothing of the row is left.
    state = ran.manifest(8)["state"]
    assert (state["cursor"], state["history"]["sick_steps"], state["rollbacks"]) == (64, 0, 0)


def test_after_a_row_the_run_goes_back_and_past_its_samples_and_a_resume_does_too(
    run_here: RunHere, tmp_path: Path, poison: Poison
) -> None:
    config = tiny(watch={"max_skipped": 3})
    poison(range(40, 64), math.inf)
    # Steps 1 to 5 are well; 6, 7 and 8 are sick; then back to the checkpoint of step 4 and stopped after two steps.
    ran = run_here(tmp_path, config, stop=StopAfter(8 + 1 + 2))
    assert skipped(ran) == [(6, 40, 47), (7, 48, 55), (8, 56, 63)]
    (back,) = ran.named("WATCH", "rollback")
    named = {key: back["data"][key] for key in ("step", "to_step", "first_sample", "last_sample", "rollbacks")}
    assert named == {"step": 8, "to_step": 4, "first_sample": 40, "last_sample": 63, "rollbacks": 1}
    state = ran.manifest(6)["state"]
    assert (state["cursor"], state["passed_over"], state["rollbacks"]) == (72, [{"first": 40, "end": 64}], 1)
    again = run_here(tmp_path, config)
    assert len(skipped(again)) == 3
    state = again.manifest(8)["state"]
    assert (state["step"], state["cursor"], state["rollbacks"]) == (8, 8 * 8 + 24, 1)
    assert sorted(again.losses) == list(range(1, 9))
    assert all(isinstance(loss, float) for loss in again.losses.values())


def test_a_run_that_goes_back_too_often_fails_and_says_what_to_change(
    run_here: RunHere, tmp_path: Path, poison: Poison
) -> None:
    # The weights themselves are lost, so that only weights that were really set back can train on.
    poison(range(8, 10_000), math.inf, weights=True)
    config = tiny(steps=30, watch={"max_skipped": 2, "max_rollbacks": 2})
    with pytest.raises(Diverged, match=r"rolled back 2 times: lower optimizer\.lr"):
        run_here(tmp_path, config)
    ran = Ran(codes=[], output=[], folder=tmp_path)
    assert [item["data"]["to_step"] for item in ran.named("WATCH", "rollback")] == [0, 0]
    told = [(item["data"]["step"], item["data"]["loss"]) for item in ran.named("STEP", "metrics")]
    first = told[0][1]
    assert math.isfinite(first) and [loss for step, loss in told if step == 1] == [first] * 3  # bit-equal
    assert [loss for step, loss in told if step > 1] == ["NaN"] * 6


def test_a_spike_moves_nothing(run_here: RunHere, tmp_path: Path, poison: Poison) -> None:
    poison(range(80, 88), 20.0)
    config = tiny(steps=12, epoch_steps=12, eval_sequences=0, watch={"spike_history": 8})
    ran = run_here(tmp_path, config)
    assert skipped(ran) == [(11, 80, 87)]
    assert "is a spike: at most" in ran.named("WATCH", "skipped")[0]["data"]["why"]
    assert ran.losses[12] < 1.5 * ran.losses[10]
