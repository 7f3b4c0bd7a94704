"""Any number of ranks, one curve: the same samples, the same losses, each sample on one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainmaster.core import heartbeat
from trainmaster.train.parallel.rank_info import RankInfo

from .runs import RunHere, Start, tiny


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_each_sample_goes_to_exactly_one_rank(world: int) -> None:
    shares = [
        RankInfo(
            rank=rank, world_size=world, local_rank=rank, local_world_size=world, node_rank=0, nodes=1, master=None
        ).share(48)
        for rank in range(world)
    ]
    assert [index for share in shares for index in share] == list(range(48))


def test_two_ranks_draw_the_curve_of_one(start: Start, run_here: RunHere, tmp_path: Path) -> None:
    config = tiny(steps=5)
    alone = run_here(tmp_path / "1", config)
    both = start(tmp_path / "2", config, ranks=2).finish()
    assert both.codes == [0, 0], both.output
    assert both.losses == pytest.approx(alone.losses, abs=1e-4)
    for phase, field in (("STEP", "grad_norm"), ("EVAL_MODEL", "loss")):
        one, two = ([item["data"][field] for item in ran.named(phase, "metrics")] for ran in (alone, both))
        assert two == pytest.approx(one, abs=1e-3)
    # Each rank wrote a shard, and only local rank 0 of the node prints.
    assert len([name for name in both.manifest(5)["files"] if name.endswith(".distcp")]) == 2
    assert "[rank 0 node 0] step 5/5 Loss: " in both.output[0]
    beats = [beat for line in both.output[0].splitlines() if (beat := heartbeat.parse(line))]
    assert [beat.step for beat in beats if beat.at == "train"] == [1, 2, 3, 4, 5]
    assert all(re.match(heartbeat.LINE_PREFIX, line) for line in both.output[0].splitlines()), both.output[0]
    assert both.output[1] == ""


def test_a_batch_that_does_not_divide_is_refused_by_every_rank(start: Start, tmp_path: Path) -> None:
    ran = start(tmp_path, tiny(batch_sequences=9), ranks=2).finish()
    assert ran.codes == [2, 2]
    assert "batch_sequences: 9 does not divide by 2 ranks; use 8" in ran.output[0]
    assert ran.events == []


def test_a_killed_peer_ends_the_run_with_a_clear_line(start: Start, tmp_path: Path) -> None:
    ranks = start(tmp_path, tiny(steps=100_000), ranks=2, env={"TRAINMASTER_COLLECTIVE_TIMEOUT_S": "20"})
    ranks.wait_for("STEP", "metrics", step=3)
    ranks.processes[1].kill()
    ran = ranks.finish()
    assert ran.codes == [1, -9]
    said = ran.output[0].splitlines()[-1]
    assert "failed: another rank is gone or hangs, see its log: rank 1 (node 0, " in said
    assert "is gone" in said
