"""Killed inside each tier's save, one after the other, a run never loses what was acknowledged, and ends the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.train.checkpoint.tiers.loss_bound import MEMORY

from ..runs import RunHere, Start, tiny


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_killed_inside_every_tier_it_resumes_what_was_acknowledged(
    start: Start, run_here: RunHere, tmp_path: Path
) -> None:
    def config(remote: str | None) -> dict[str, object]:
        memory = {"use": "on" if remote else "off", "every_steps": 1}
        return {"every_steps": 2, "mode": "sync", "memory": memory, "remote": remote}

    plan = tiny(steps=12, epoch_steps=100, eval_sequences=0, checkpoint=config(str(tmp_path / "far")))
    unbroken = run_here(
        tmp_path / "unbroken", tiny(steps=12, epoch_steps=100, eval_sequences=0, checkpoint=config(None))
    )
    folder = tmp_path / "run"
    # Memory has its own file and the disk has none; memory is whole; a file is in the store; all but its manifest.
    for place in ("memory:local 3", "memory:peer 2", "remote:file 2", "remote:manifest 2"):
        killed = start(folder, plan, env={"TRAINMASTER_KILL_AT": place}).finish()
        assert killed.codes == [-9], (place, killed.output)
    ran = start(folder, plan).finish()
    assert ran.codes == [0], ran.output
    starts = [index for index, item in enumerate(ran.events) if (item["phase"], item["event"]) == ("TRAINING", "start")]
    assert len(starts) == 5
    for index in starts[1:]:
        before = [item["data"] for item in ran.events[:index] if item["event"] == "saved"]
        assert ran.events[index]["data"]["resumed_from"] >= max(one["step"] for one in before)
    assert {item["data"]["tier"] for item in ran.named("CHECKPOINT", "loaded")} == {MEMORY}
    assert ran.named("CHECKPOINT", "rejected") == []
    assert ran.losses == unbroken.losses  # bit-equal
    far = [item["data"]["step"] for item in ran.named("CHECKPOINT", "saved") if item["data"]["tier"] == "remote"]
    assert far[-1] == 12
