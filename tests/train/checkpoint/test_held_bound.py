"""A stated bound is held: training waits for a save that takes longer than any before it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from trainmaster.train.checkpoint import save
from trainmaster.train.checkpoint.manifest import FileRecord
from trainmaster.train.checkpoint.write import write

from ..runs import RunHere, read_events, tiny

pytestmark = pytest.mark.alone


@pytest.mark.proof
def test_no_step_is_begun_that_could_cost_more_than_was_said(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, limits = tmp_path / "events.jsonl", list[int]()

    def slow(path: Path, pieces: Iterable[bytes | memoryview], *, over: bool) -> FileRecord:
        """The first save after a bound was stated hangs until training is where it may go no further."""
        stated = [item["data"]["losses"]["process"] for item in read_events(events) if item["event"] == "bound"]
        if stated and not limits:
            saved = max(item["data"]["step"] for item in read_events(events) if item["event"] == "saved")
            limits.append(saved + stated[-1]["lost_steps"])
            while max(item["data"]["step"] for item in read_events(events) if item["phase"] == "STEP") < limits[0]:
                time.sleep(0.01)
            time.sleep(0.5)  # a step takes a hundredth of that: who is not held runs on
        return write(path, pieces, over=over)

    monkeypatch.setattr(save, "write", slow)
    config = tiny(steps=120, eval_sequences=0, epoch_steps=1000, checkpoint={"every_steps": 4, "mode": "async"})
    ran = run_here(tmp_path, config)
    order = [(item["event"], item["data"]["step"]) for item in ran.events if item["event"] in ("metrics", "saved")]
    hung = next(
        place for place, (event, _) in enumerate(order) if event == "saved" and ("metrics", limits[0]) in order[:place]
    )
    assert [step for event, step in order[:hung] if event == "metrics"][-1] == limits[0]
    assert ran.named("CHECKPOINT", "saved")[-1]["data"]["step"] == 120
