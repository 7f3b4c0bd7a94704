"""The node program before it runs the agent: ranks, a second job, a release, and the restart of a requeued job."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from pathlib import Path

import pytest

from trainmaster.core.errors import TargetError
from trainmaster.core.plan import (
    EVENTS_FILE,
    EXIT_FILE,
    LOCK_FILE,
    MEMBERS_FILE,
    PLAN_FILE,
    STOP_FILE,
    ExitRecord,
    Plan,
)
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason
from trainmaster.remote.slurm import node_start
from trainmaster.remote.slurm.layout import node_folder, read_restart
from trainmaster.remote.slurm.login import LoginNode

ENV = {"SLURM_JOB_ID": "17", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs" / "j" / "attempts" / "1"
    folder.mkdir(parents=True)
    spec = parse_spec({"name": "a", "command": ["true"], "limits": {"grace_s": 0}})
    plan = Plan(attempt="j.1", spec=spec, folder=str(folder), checkpoints=str(tmp_path / "checkpoints"))
    (folder / PLAN_FILE).write_text(plan.to_json())
    return folder


def read(base: Path, offset: int, *, node: int = 0) -> bytes:
    params = {"base": str(base), "task": None, "node": node, "stream": EVENTS_FILE, "offset": offset, "limit": 1000}
    _, body = asyncio.run(LoginNode().answer("read", params))
    return body


def test_the_plan_of_a_node(base: Path) -> None:
    plan = node_start.prepare(base, ENV)
    assert (plan.attempt, plan.node_rank, plan.folder) == ("j.1", 0, str(base.with_name("1-node-0")))
    assert Plan.from_json((Path(plan.folder) / PLAN_FILE).read_text()) == plan


def test_tasks_of_an_array_are_runs_of_their_own(base: Path) -> None:
    env = {**ENV, "SLURM_ARRAY_JOB_ID": "17", "SLURM_JOB_ID": "19", "SLURM_ARRAY_TASK_ID": "3"}
    plan = node_start.prepare(base, env)
    assert (plan.attempt, plan.checkpoints.rpartition("/")[2]) == ("j.1/3", "task-3")
    assert plan.mark == "j.1/3" and Path(plan.folder).name == "1-task-3-node-0"
    other = node_start.prepare(base, {**env, "SLURM_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "4"})
    assert other.mark == "j.1/4"


@pytest.mark.parametrize(
    ("node", "record", "members", "spares", "dispensable"),
    [
        (1, "{}", None, 1, False),  # its end is that of the attempt
        (1, "{}", [0, 2], 1, True),  # a spare has its place
        (2, "{}", None, 1, True),  # a spare that failed its pre-flight
        (2, "{}", [0, 2], 1, False),  # a spare that has a place
        (1, None, None, 1, True),  # its agent was killed: node 0 judges
        (1, None, None, 0, False),
        (0, None, [0, 2], 1, False),
        (1, "{}", [0, 9], 1, False),  # what node 0 wrote is none of this attempt
    ],
)
def test_a_node_that_a_spare_can_replace_does_not_end_the_others(
    base: Path, node: int, record: str | None, members: list[int] | None, spares: int, dispensable: bool
) -> None:
    resources = {"nodes": 2, "spares": spares}
    spec = parse_spec({"name": "a", "train": {"steps": 8, "batch_sequences": 8}, "resources": resources})
    folders = [node_folder(base, None, number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    if record is not None:
        (folders[node] / EXIT_FILE).write_text(record)
    if members is not None:
        (folders[0] / MEMBERS_FILE).write_text(json.dumps(members))
    plan = Plan(attempt="j.1", spec=spec, folder=str(folders[node]), checkpoints="/c", node_rank=node, master_port=1)
    assert node_start.is_dispensable(plan, base, ENV) is dispensable


@pytest.mark.parametrize(
    ("node", "reason", "misses"),
    [(2, Reason.NODE_LOST, True), (2, Reason.CHECK_FAILED, False), (1, Reason.NODE_LOST, False), (2, None, False)],
)
def test_a_spare_that_misses_node_0_says_so(base: Path, node: int, reason: Reason | None, misses: bool) -> None:
    spec = parse_spec({"name": "a", "train": {"batch_sequences": 8}, "resources": {"nodes": 2, "spares": 1}})
    plan = Plan(attempt="j.1", spec=spec, folder=str(base), checkpoints="/c", node_rank=node, master_port=1)
    if reason is not None:
        record = ExitRecord(attempt="j.1", ok=False, ended_at="2026-01-01T00:00:00Z", reason=reason, message="")
        (base / EXIT_FILE).write_text(record.to_json())
    assert node_start.misses_first(plan) is misses


def test_a_second_job_of_the_same_attempt_starts_nothing(base: Path) -> None:
    node_start.prepare(base, ENV)
    with pytest.raises(TargetError, match="Slurm job 17 runs this attempt; job 18 starts nothing"):
        node_start.prepare(base, {**ENV, "SLURM_JOB_ID": "18"})


def test_a_released_attempt_starts_nothing(base: Path) -> None:
    (base / "released").touch()
    with pytest.raises(TargetError, match="was released"):
        node_start.prepare(base, ENV)
    assert not node_folder(base, None, 0).exists()


def test_a_stop_request_from_before_the_start_reaches_the_agent(base: Path) -> None:
    (base / STOP_FILE).write_text("user_cancelled: no\n")
    assert (Path(node_start.prepare(base, ENV).folder) / STOP_FILE).read_text() == "user_cancelled: no\n"


def test_after_a_restart_a_reader_goes_on_at_its_offset(base: Path) -> None:
    old = Path(node_start.prepare(base, ENV).folder)
    (old / EVENTS_FILE).write_text("one\ntwo\n")
    (old / "rank-0.log").write_text("printed\n")
    assert read(base, 0) == b"one\ntwo\n"
    (old / EXIT_FILE).write_text("{}")  # how the first start ended does not count any more
    new = Path(node_start.prepare(base, {**ENV, "SLURM_RESTART_COUNT": "1"}).folder)
    assert (new.name, read_restart(base, None)) == ("1-node-0-r1", 1)
    assert not (new / EXIT_FILE).exists() and (new / "rank-0.log").read_text() == "printed\n"
    with (new / EVENTS_FILE).open("a") as file:
        file.write("three\n")
    (old / EVENTS_FILE).write_text("one\ntwo\nlate\n")  # what a forgotten process still writes is read by nobody
    assert read(base, 8) == b"three\n"
    again = Path(node_start.prepare(base, {**ENV, "SLURM_RESTART_COUNT": "2"}).folder)
    assert (again / EVENTS_FILE).read_text() == "one\ntwo\nthree\n"


def test_an_agent_that_still_runs_is_asked_to_stop_and_prevents_the_restart(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_start, "_FENCE_S", 0.3)
    old = Path(node_start.prepare(base, ENV).folder)
    fd = os.open(old / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(TargetError, match="still runs; nothing started"):
            node_start.prepare(base, {**ENV, "SLURM_RESTART_COUNT": "1"})
    finally:
        os.close(fd)
    assert (old / STOP_FILE).read_text().startswith("node_lost:")
    assert read_restart(base, None) == 0
    assert node_start.prepare(base, {**ENV, "SLURM_RESTART_COUNT": "1"}).folder.endswith("-r1")


def test_nothing_is_read_twice_while_the_restart_takes_over(base: Path) -> None:
    old = Path(node_start.prepare(base, ENV).folder)
    (old / EVENTS_FILE).write_text("one\n")
    (base / "restart-0").write_text("1")  # the marker is there, the copy is not yet
    assert read(base, 0) == b""
