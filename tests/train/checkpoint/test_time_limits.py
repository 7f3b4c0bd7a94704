"""Time limits by activity: a slow load is not a dead peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..runs import Start, tiny

# Read by Python at its start: on rank 1 the disk is slow once.
SLOW_DISK = """
import os, pathlib, time
if os.environ.get("RANK") == "1":
    plain = pathlib.Path.open
    def slow(self, *args, **kwargs):
        if self.name == "__1_0.distcp":
            time.sleep(float(os.environ["SLOW_S"]))
        return plain(self, *args, **kwargs)
    pathlib.Path.open = slow
"""


@pytest.fixture
def slow_disk(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW_DISK)
    return {"PYTHONPATH": str(tmp_path / "site"), "SLOW_S": "7"}


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_rank_that_loads_for_longer_than_a_step_may_take(
    tmp_path: Path, start: Start, slow_disk: dict[str, str]
) -> None:
    config = tiny(steps=4, eval_sequences=0, checkpoint={"every_steps": 4})
    assert start(tmp_path, config, ranks=2).finish().codes == [0, 0]
    limits = {"TRAINMASTER_COLLECTIVE_TIMEOUT_S": "4"}
    ran = start(tmp_path, tiny(steps=6, eval_sequences=0), ranks=2, env={**slow_disk, **limits}).finish()
    assert ran.codes == [0, 0], ran.output
    (loaded,) = ran.named("CHECKPOINT", "loaded")
    assert loaded["data"]["seconds"] > 4


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_load_that_never_ends_ends_the_run(tmp_path: Path, start: Start, slow_disk: dict[str, str]) -> None:
    config = tiny(steps=4, eval_sequences=0, checkpoint={"every_steps": 4})
    assert start(tmp_path, config, ranks=2).finish().codes == [0, 0]
    longer = tiny(steps=6, eval_sequences=0, timeouts={"load_s": 8.0})
    ran = start(tmp_path, longer, ranks=2, env={**slow_disk, "SLOW_S": "600"})
    assert ran.processes[0].wait() == 1
    ran.kill()
    said = (tmp_path / "rank-0.log").read_text()
    assert "rank 1 (node 0" in said and "it is loading" in said
