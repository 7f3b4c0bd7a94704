"""Some of the kills of `make chaos-recovery`, drawn by the day."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent.recovery_chaos import GROUP_VICTIMS, compare, compare_groups, draw, run
from sampling import VARIABLE

SEED = os.environ.get(VARIABLE, "0")
KILLS = 2


def write(folder: Path, *, loss: float = 1.0, digest: str = "a", steps: int = 2) -> Path:
    """A run of two steps as its files tell it, the second with this loss and this sample."""
    attempt, samples = folder / "attempts" / "1-0", folder / "samples" / "1"
    for made in (attempt, samples):
        made.mkdir(parents=True)
    told = [{"phase": "STEP", "event": "metrics", "data": {"step": n, "loss": loss if n == 2 else 1.0}} for n in (1, 2)]
    (attempt / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    rows = [{"step": n, "first": n, "rows": [digest if n == 2 else "a"], "draws": 0} for n in range(1, steps + 1)]
    (samples / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, []),
        ({"loss": 2.0}, ["step 2: loss {2.0}, not 1.0"]),
        ({"digest": "b"}, ["step 2: sample 2 is another"]),
        ({"steps": 1}, ["step 2 was never made"]),
    ],
)
def test_a_run_that_differs_is_told_apart(tmp_path: Path, change: dict[str, object], says: list[str]) -> None:
    assert compare(write(tmp_path / "struck", **change), write(tmp_path / "whole")) == says  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({3: "aa"}, []),
        ({3: "a", 4: "aa"}, ["attempt 1 epoch 3 step 2: samples are lost, doubled or others"]),
        ({3: "ab"}, ["attempt 1 epoch 3 step 2: samples are lost, doubled or others"]),
        ({3: "aaa"}, ["attempt 1 epoch 3 step 2: samples are lost, doubled or others"]),
        ({}, ["step 2 was never made"]),
    ],
)
def test_a_sum_over_groups_without_each_sample_once_is_told(
    tmp_path: Path, made: dict[int, str], says: list[str]
) -> None:
    """Step 2 has samples 2 and 3; a third row is one that two groups took."""
    whole, struck = write(tmp_path / "whole"), write(tmp_path / "struck", loss=1.000009)
    both = [{"step": 1, "first": 1, "rows": ["a"]}, {"step": 2, "first": 2, "rows": ["a", "a"]}]
    (whole / "samples" / "1" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in both))
    lines = [{"step": 1, "epoch": 1, "first": 1, "rows": ["a"]}, {"step": 1, "epoch": 1, "made": True}]
    lines.append({"step": 2, "epoch": 2, "first": 2, "rows": ["b", "b"]})  # a sum that was not made counts for nothing
    for epoch, rows in made.items():
        lines += [{"step": 2, "epoch": epoch, "first": 2 + at % 2, "rows": [row]} for at, row in enumerate(rows)]
        lines.append({"step": 2, "epoch": epoch, "made": True})
    (struck / "samples" / "1" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare_groups(struck, whole) == says
    far = write(tmp_path / "far", loss=1.00002)
    (far / "samples" / "1" / "rank-0.jsonl").write_text((struck / "samples" / "1" / "rank-0.jsonl").read_text())
    assert compare_groups(far, whole) == ["step 2: loss 1.00002, not 1.0", *says]


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
@pytest.mark.timeout(900)
def test_replica_groups_survive_kills_without_a_trace(tmp_path: Path) -> None:
    done, faults = run(tmp_path, draw(KILLS, SEED, GROUP_VICTIMS), seed=SEED, step_s=15.0, groups=2)
    assert len(done) == KILLS and [kill for kill in done if kill.orphans] == []
    assert faults == []


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
@pytest.mark.timeout(900)
def test_a_run_on_two_nodes_survives_kills_without_a_trace(tmp_path: Path) -> None:
    done, faults = run(tmp_path, draw(KILLS, SEED), seed=SEED, step_s=15.0)
    assert len(done) == KILLS and [kill for kill in done if kill.orphans] == []
    assert faults == []
