"""Saving while training goes on: what is written is the step that was saved, and nothing begun is left undone."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from trainmaster.train import loop
from trainmaster.train.checkpoint import host_copy, save
from trainmaster.train.checkpoint.manifest import FileRecord
from trainmaster.train.checkpoint.write import write
from trainmaster.train.compute import forward_backward

from ..runs import RunHere, read_events, tiny

Write = Callable[[Path, Iterable[bytes | memoryview]], FileRecord]
QUIET = {"eval_sequences": 0, "epoch_steps": 1000}


def behind(**changes: Any) -> dict[str, Any]:
    return {"mode": "async", "keep": 100, **changes}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Write], None]:
    """Put something between the saves and the disk."""
    return lambda slow: monkeypatch.setattr(save, "write", slow)


def slow_until(events: Path, step: int) -> Write:
    """A disk that writes nothing before training has come to that step."""

    def slow(path: Path, pieces: Iterable[bytes | memoryview], *, over: bool) -> FileRecord:
        while not any(item["event"] == "metrics" and item["data"]["step"] >= step for item in read_events(events)):
            time.sleep(0.01)
        return write(path, pieces, over=over)

    return slow


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_what_is_written_late_is_the_step_that_was_saved(
    run_here: RunHere,
    disk: Callable[[Write], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = run_here(tmp_path / "sync", tiny(steps=40, **QUIET, checkpoint={"every_steps": 1, "keep": 100}))
    disk(slow_until(tmp_path / "late" / "events.jsonl", step=5))
    late = run_here(tmp_path / "late", tiny(steps=40, **QUIET, checkpoint=behind(every_steps=2)))
    assert late.losses == whole.losses
    steps = [item["data"]["step"] for item in late.named("CHECKPOINT", "saved")]
    assert steps[0] == 2
    assert steps[-1] == 40
    # The one of step 4 was due while the first was still being written.
    assert steps[1] > 5
    assert f"step {steps[1]} is saved instead of 4; checkpoint.every_steps: {steps[1] - 2} would hold" in (
        capsys.readouterr().out
    )
    for step in steps:  # the same bytes as a save that training waited for, and no other step's
        assert late.manifest(step)["files"] == whole.manifest(step)["files"]
    assert whole.manifest(2)["files"] != whole.manifest(3)["files"]
    order = [item["event"] for item in late.events if item["event"] == "saved" or item.get("data", {}).get("step") == 5]
    assert order[:2] == ["metrics", "saved"]


def test_training_waits_for_the_turn_of_an_exact_save(
    run_here: RunHere, disk: Callable[[Write], None], tmp_path: Path
) -> None:
    def slow(path: Path, pieces: Iterable[bytes | memoryview], *, over: bool) -> FileRecord:
        time.sleep(0.05)
        return write(path, pieces, over=over)

    disk(slow)
    ran = run_here(tmp_path, tiny(steps=6, **QUIET, checkpoint={**behind(every_steps=2), "mode": "exact"}))
    assert [item["data"]["step"] for item in ran.named("CHECKPOINT", "saved")] == [2, 4, 6]


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_run_resumed_from_a_background_save_is_bit_equal_for_50_steps(run_here: RunHere, tmp_path: Path) -> None:
    config = tiny(steps=60, **QUIET, checkpoint={**behind(every_steps=10), "mode": "exact"})
    unbroken = dict(run_here(tmp_path, config).losses)
    for step in range(20, 61, 10):
        (tmp_path / "checkpoints" / f"step-{step:08d}").rename(tmp_path / f"aside-{step}")
    (tmp_path / "events.jsonl").unlink()
    again = run_here(tmp_path, config)
    assert again.named("TRAINING", "start")[0]["data"]["resumed_from"] == 10
    assert again.losses == {step: unbroken[step] for step in range(11, 61)}


def test_a_failed_save_is_tried_again(run_here: RunHere, disk: Callable[[Write], None], tmp_path: Path) -> None:
    tried: list[str] = []

    def full_at_first(path: Path, pieces: Iterable[bytes | memoryview], *, over: bool) -> FileRecord:
        tried.append(path.name)
        if tried.count(path.name) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, pieces, over=over)

    disk(full_at_first)
    ran = run_here(tmp_path, tiny(steps=3, **QUIET, checkpoint=behind(every_steps=3, retries=2)))
    assert [item["data"]["step"] for item in ran.named("CHECKPOINT", "saved")] == [3]
    assert not ran.named("CHECKPOINT", "failed")
    assert tried.count("__0_0.distcp") == 3


def test_when_no_attempt_is_left_it_is_told_once_and_training_goes_on(
    run_here: RunHere, disk: Callable[[Write], None], tmp_path: Path
) -> None:
    def full(path: Path, pieces: Iterable[bytes | memoryview], *, over: bool) -> FileRecord:
        if "step-00000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, pieces, over=over)

    disk(full)
    ran = run_here(tmp_path, tiny(steps=4, **QUIET, checkpoint={**behind(every_steps=2, retries=1), "mode": "exact"}))
    (failed,) = ran.named("CHECKPOINT", "failed")
    assert failed["data"]["step"] == 2
    assert "No space left on device" in failed["data"]["why"]
    assert "(2 attempts)" in failed["data"]["why"]
    assert ran.checkpoints == ["step-00000004"]  # what the failed one took is given back


def test_a_save_under_way_is_finished_when_training_fails(
    run_here: RunHere, disk: Callable[[Write], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: Path, pieces: Iterable[bytes | memoryview], *, over: bool) -> FileRecord:
        time.sleep(0.3)
        return write(path, pieces, over=over)

    disk(slow)
    passes = iter(range(100))
    compute = forward_backward

    def fail_later(*arguments: Any) -> Any:
        if next(passes) == 3:
            raise RuntimeError("the GPU has fallen off the bus")
        return compute(*arguments)

    monkeypatch.setattr(loop, "forward_backward", fail_later)
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        run_here(tmp_path, tiny(steps=8, **QUIET, checkpoint=behind(every_steps=3)))
    saved = [item for item in read_events(tmp_path / "events.jsonl") if item["event"] == "saved"]
    assert [item["data"]["step"] for item in saved] == [3]
    assert (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").exists()


def test_a_copy_that_has_no_room_in_memory_fails_the_save_alone(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([1000, 1 << 40])
    monkeypatch.setattr(host_copy, "free_bytes", lambda _: next(free))
    ran = run_here(tmp_path, tiny(steps=4, **QUIET, checkpoint={**behind(every_steps=2, retries=0), "mode": "exact"}))
    (failed,) = ran.named("CHECKPOINT", "failed")
    assert failed["data"]["step"] == 2
    assert "1,000 are free" in failed["data"]["why"]
    assert ran.checkpoints == ["step-00000004"]
