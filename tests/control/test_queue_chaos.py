"""Samples of `make chaos-queue`: real jobs on GPUs of a stand-in, while servers are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from control import queue_chaos
from postgres import Postgres

pytestmark = [pytest.mark.spawns, pytest.mark.slow]


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
def test_no_gpu_is_booked_twice_while_the_reconciler_is_killed(tmp_path: Path) -> None:
    outcome = queue_chaos.run(tmp_path, jobs=5, seed=3, every_s=(3.0, 5.0))
    assert outcome.faults == []
    assert outcome.kills and outcome.passes


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
def test_two_servers_on_postgresql_share_the_queue_while_they_are_killed(tmp_path: Path, postgres: Postgres) -> None:
    outcome = queue_chaos.run(tmp_path, jobs=5, seed=4, every_s=(3.0, 5.0), servers=2, where=postgres.create())
    assert outcome.faults == []
    assert outcome.kills and outcome.passes
