"""Some of the kills of `make chaos-recovery`, drawn by the day."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent.recovery_chaos import compare, draw, run
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


@pytest.mark.matrix(one_in=5, of="runs that lose a machine")
@pytest.mark.timeout(900)
def test_a_run_on_two_nodes_survives_kills_without_a_trace(tmp_path: Path) -> None:
    done, faults = run(tmp_path, draw(KILLS, SEED), seed=SEED, step_s=15.0)
    assert len(done) == KILLS and [kill for kill in done if kill.orphans] == []
    assert faults == []
