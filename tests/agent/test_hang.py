"""A rank stopped with SIGSTOP: named within the time limit, with node and collective, also in the exit record."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.states import Reason

pytestmark = pytest.mark.alone

TRAIN = {
    "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn_width": 16},
    "optimizer": {"warmup_steps": 1},
    "steps": 1_000_000,
    "epoch_steps": 1_000_000,
    "batch_sequences": 4,
    "sequence_tokens": 16,
    "device": "cpu",
    "checkpoint": {"every_steps": 1_000_000},
    "recovery": {"in_place": False},
}
LIMIT_S = 12


@pytest.mark.matrix(one_in=4, of="ranks that hang")
def test_a_stopped_rank_is_named_with_its_node_and_collective(node: Any) -> None:
    env = {"TRAINMASTER_COLLECTIVE_TIMEOUT_S": str(LIMIT_S)}
    plan = node.plan(ranks=2, train=TRAIN, env=env, limits={"grace_s": 0.5})
    agent = node.start(plan)
    log = node.folder / "rank-0.log"
    node.until(lambda: log.exists() and "heartbeat step=3 " in log.read_text(), what="the third step", limit_s=90)
    pid = rank_pid(agent.pid, 1)
    os.kill(pid, signal.SIGSTOP)
    record = node.over()
    assert record.reason is Reason.COLLECTIVE_TIMEOUT
    assert record.evidence["rank"] == 0
    said = record.message
    assert re.search(rf"hang: rank 1 \(node 0, \S+, pid {pid}\) is stopped \(SIGSTOP", said), said
    assert re.search(r"1 of 2 ranks wait in \w+ #\d+ of gloo:\S+ \([\d,]+ elements\) in step \d+", said), said
    waited = re.search(r"gave up after (\d+) s", said)
    assert waited
    assert int(waited[1]) < LIMIT_S
    (early, last) = (event for event in node.events() if (event["phase"], event["event"]) == ("WATCH", "hang"))
    assert early["data"]["ranks"] == last["data"]["ranks"] == [1]
    assert "waiting: rank 1 (node 0, " in log.read_text()


def rank_pid(agent: int, rank: int) -> int:
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    raise AssertionError(f"rank {rank} is no child of {agent}")
