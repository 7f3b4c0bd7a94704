"""One rank, start to end: it learns, tells what it does, ends at its last step, and evaluates on the side."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.core.errors import SpecError
from trainmaster.train import loop

from .runs import RunHere, tiny


def test_the_loss_falls_below_half_and_the_held_out_loss_with_it(run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here(tmp_path, tiny(steps=60, epoch_steps=30, batch_sequences=16, optimizer={"lr": 0.02}))
    (end,) = ran.named("TRAINING", "end")
    assert end["data"]["loss_first"] == pytest.approx(6.05, abs=0.5)  # ln 256, and logits of variance one
    assert end["data"]["loss_last"] < 0.5 * end["data"]["loss_first"]
    assert ran.named("EVAL_MODEL", "metrics")[-1]["data"]["loss"] < 0.5 * end["data"]["loss_first"]


def test_events_come_in_order_with_their_fields(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "count_compile_s", lambda: 1.6)  # by another run of this process
    ran = run_here(tmp_path, tiny(steps=6))
    said = [f"{item['phase']} {item['event']} {item.get('epoch', '')}".strip() for item in ran.events]
    said = [word for word in said if word != "CHECKPOINT bound"]  # after the first save whose time is known
    steps = ["STEP metrics"] * 4
    evaluation = ["EVAL_TRAINING start", "EVAL_MODEL metrics", "EVAL_TRAINING end", "CHECKPOINT saved"]
    assert said == [
        "START part", "START part", "TRAINING start", "STEP metrics", "START part", "START done",
        *steps[1:], *evaluation, "TRAINING epoch_complete 1",
        *steps[:2], *evaluation, "TRAINING epoch_complete 2",
        "TRAINING end",
    ]  # fmt: skip
    assert [item["data"]["part"] for item in ran.named("START", "part")] == ["build", "load", "first_step"]
    by_name = {f"{item['phase']} {item['event']}": item["data"] for item in ran.events}
    assert set(by_name["TRAINING start"]) == set(
        "steps parameters ranks device device_name precision batch_sequences sequence_tokens resumed_from torch "
        "data_source".split()
    )
    assert set(by_name["STEP metrics"]) == set(
        "step loss lr grad_norm tokens_per_s tokens_per_s_per_gpu samples_per_s step_s mfu mfu_measured data_share "
        "compute_share comm_share memory_gib".split()
    )
    assert by_name["STEP metrics"]["mfu"] is None  # nobody publishes the peak of this CPU
    path = str(tmp_path / "checkpoints" / "step-00000006")
    assert by_name["TRAINING epoch_complete"]["model_path"] == path
    assert by_name["TRAINING epoch_complete"]["avg_loss"] == pytest.approx((ran.losses[5] + ran.losses[6]) / 2)
    assert by_name["CHECKPOINT saved"]["path"] == path
    assert by_name["TRAINING end"]["stopped"] is False


def test_it_ends_exactly_at_its_last_step(run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here(tmp_path, tiny(steps=7, epoch_steps=5, checkpoint={"every_steps": 3}))
    assert list(ran.losses) == [1, 2, 3, 4, 5, 6, 7]
    assert ran.manifest(7)["state"]["cursor"] == 7 * 8
    again = run_here(tmp_path, tiny(steps=7, epoch_steps=5, checkpoint={"every_steps": 3}))
    assert len(again.named("STEP", "metrics")) == 7  # a finished run has nothing left to do
    assert len(again.named("TRAINING", "epoch_complete")) == 2


def test_evaluation_moves_neither_the_cursor_nor_the_curve(run_here: RunHere, tmp_path: Path) -> None:
    often = run_here(tmp_path / "often", tiny(steps=6, epoch_steps=1))
    never = run_here(tmp_path / "never", tiny(steps=6, epoch_steps=1, eval_sequences=0))
    assert often.losses == never.losses
    assert not never.named("EVAL_MODEL", "metrics")
    assert often.manifest(6)["state"]["cursor"] == never.manifest(6)["state"]["cursor"]


def test_the_sequence_length_reaches_the_model(run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here(tmp_path, tiny(steps=3, sequence_tokens=48))
    assert ran.named("TRAINING", "start")[0]["data"]["sequence_tokens"] == 48
    assert ran.losses != run_here(tmp_path / "short", tiny(steps=3)).losses


def test_a_vocabulary_too_small_for_the_source_is_refused_before_the_start(run_here: RunHere, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"model\.vocab: 100 is less than the 256 tokens of tales; use 256"):
        run_here(tmp_path, tiny(model={"vocab": 100}))


def test_the_gradient_is_clipped_and_its_norm_told(run_here: RunHere, tmp_path: Path) -> None:
    free = run_here(tmp_path / "free", tiny(steps=3, optimizer={"grad_clip": 100.0, "warmup_steps": 1}))
    tight = run_here(tmp_path / "tight", tiny(steps=3, optimizer={"grad_clip": 1e-9, "warmup_steps": 1}))
    norms = [item["data"]["grad_norm"] for item in tight.named("STEP", "metrics")]
    assert norms[0] == free.named("STEP", "metrics")[0]["data"]["grad_norm"] > 0.1  # told as it was before clipping
    # AdamW's epsilon of 1e-8 swallows gradients of 1e-9, so nothing was learnt.
    assert tight.losses[3] > free.losses[3]
