"""Managed checkpoints on several ranks: a rank dies in a save, and the number of ranks changes both ways."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sims.checkpoint_daemon import Daemon, Faults

from ..runs import RunHere, Start, StopAfter
from .managed_runs import Managed, loaded, place, rejected, saved


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_the_newest_whole_step_is_found_whoever_wrote_it(
    managed: Managed, daemon: Daemon, start: Start, run_here: RunHere, tmp_path: Path
) -> None:
    config = managed()
    namespace = place(config).rpartition("/")[2]
    whole = run_here(tmp_path / "whole", managed(checkpoint={"managed": None}))

    # Two ranks; the second one dies while its part of step 6 is on its way, after the first one's has arrived.
    daemon.faults = Faults(slow_s=3600, only=f"/{namespace}-2r/1/6")
    two = start(tmp_path / "two", config, ranks=2)
    while 0 not in daemon.memory.held().get(f"{namespace}-2r", {}).get(6, []):
        assert two.processes[0].poll() is None, two.finish().output
        time.sleep(0.02)
    two.processes[1].kill()
    ended = two.finish()
    assert ended.codes[0] == 1 and "another rank is gone" in ended.output[0]
    assert saved(ended) == [(2, "memory"), (4, "memory"), (4, "s3")]
    daemon.faults = Faults()

    # One rank finds step 4 in memory and passes over step 6; it is told to stop at once, and so saves nothing.
    one = run_here(tmp_path / "one", managed(), stop=StopAfter(0))
    assert loaded(one) == (4, "memory")
    assert [line for line in rejected(one) if f"{namespace}-2r step 6: never finished" in line]
    # The same from S3, which takes the run further.
    daemon.memory.lose()
    one = run_here(tmp_path / "one from S3", managed())
    assert loaded(one) == (4, "s3")
    assert saved(one)[-2:] == [(10, "memory"), (10, "s3")]

    # Two again, from what one wrote.
    two = start(tmp_path / "two again", managed(steps=12), ranks=2)
    ended = two.finish()
    assert ended.codes == [0, 0], ended.output
    assert (loaded(ended), rejected(ended)) == ((10, "memory"), [])
    assert saved(ended)[-2:] == [(12, "memory"), (12, "s3")]
    assert one.losses == pytest.approx({step: whole.losses[step] for step in one.losses}, abs=1e-5)
