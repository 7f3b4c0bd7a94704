"""Recovery in place: when it follows a failure, how ranks are forked, and a killed rank seen through to its end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainmaster.agent import ranks as agent_ranks
from trainmaster.agent import workload
from trainmaster.agent.diagnose import Outcome, read_tail
from trainmaster.agent.leader import free_port
from trainmaster.agent.processes import living
from trainmaster.agent.ranks import ForkServer, Starter
from trainmaster.agent.recovery import Recovery
from trainmaster.core.plan import (
    EVENTS_FILE,
    EXIT_FILE,
    MEMBERS_FILE,
    PLAN_FILE,
    RESUMABLE_EXIT,
    START_VARIABLE,
    Plan,
)
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason
from trainmaster.node.emit import Emitter
from trainmaster.train import fork_server

TRAIN = {
    "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn_width": 16},
    "optimizer": {"warmup_steps": 1},
    "steps": 8,
    "epoch_steps": 8,
    "batch_sequences": 4,
    "sequence_tokens": 16,
    "eval_sequences": 0,
    "device": "cpu",
    "checkpoint": {"every_steps": 2, "mode": "sync"},
}


def recovery(tmp_path: Path, **spec: Any) -> Recovery:
    what = {"train": TRAIN} if "command" not in spec else {}
    plan = Plan(
        attempt="job.1", spec=parse_spec({"name": "a", **what, **spec}), folder=str(tmp_path), checkpoints="/none"
    )
    return Recovery(plan, Emitter(tmp_path / EVENTS_FILE))


def crash(reason: Reason = Reason.CRASHED) -> Outcome:
    return Outcome(reason=reason, message="rank 1 of 2 was killed by SIGKILL", evidence={"rank": 1})


@pytest.mark.parametrize(
    ("reason", "spec", "follows"),
    [
        (Reason.CRASHED, {}, True),
        (Reason.COLLECTIVE_TIMEOUT, {}, True),
        (Reason.TARGET_ERROR, {}, True),
        (Reason.OUT_OF_MEMORY, {}, False),
        (Reason.SCRIPT_FAILED, {}, False),
        (Reason.NODE_LOST, {}, False),
        (Reason.CRASHED, {"limits": {"retry": {"crashed": False}}}, False),
        (Reason.CRASHED, {"resources": {"nodes": 2, "processes_per_node": 1}}, True),
        (Reason.CRASHED, {"train": {**TRAIN, "recovery": {"in_place": False}}}, False),
        (Reason.CRASHED, {"command": ["true"]}, False),
    ],
)
def test_causes_that_may_pass_are_recovered_in_place(
    tmp_path: Path, reason: Reason, spec: dict[str, Any], follows: bool
) -> None:
    assert recovery(tmp_path, **spec).may_follow(crash(reason)) is follows


@pytest.mark.parametrize(
    ("reason", "spec", "left_s"),
    [
        (Reason.SCRIPT_FAILED, {}, 1.0),
        (Reason.CRASHED, {"train": {**TRAIN, "recovery": {"in_place": False}}}, 1.0),
        (Reason.CRASHED, {}, 0.0),
        (Reason.SCRIPT_FAILED, {"command": ["true"]}, 10.0),
        (Reason.SCRIPT_FAILED, {"command": ["true"], "limits": {"grace_s": 4}}, 4.0),
    ],
)
def test_peers_of_a_failed_rank_that_can_save_nothing_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Reason, spec: dict[str, Any], left_s: float
) -> None:
    """A save of our trainer needs every rank; of another program nobody knows."""
    monkeypatch.setattr(workload, "time", SimpleNamespace(monotonic=lambda: 100.0))
    held = recovery(tmp_path, **spec)
    failed: Any = [SimpleNamespace(number=0, process=SimpleNamespace(returncode=1))]
    parts: Any = SimpleNamespace(recovery=held, group=None, watch=None)
    stopping = workload._on_failure(failed, held._plan, parts, lambda _: crash(reason))
    assert (stopping.deadline - 100.0, stopping.stop) == (left_s, None)


def test_recoveries_without_a_new_checkpoint_are_counted(tmp_path: Path) -> None:
    held = recovery(tmp_path, train={**TRAIN, "recovery": {"tries": 2}})
    saved = {"step": 2, "path": "p", "seconds": 1.0, "bytes": 1, "tier": "disk", "stall_s": 0.0}
    for expected in (1, 2):
        held.see(crash())
        assert held.may_follow(crash())
        held.begin(crash())
        assert held.without_save == expected
    assert not held.may_follow(crash()), "two in a row, and nothing was saved"
    with Emitter(tmp_path / EVENTS_FILE) as events:
        events.emit("CHECKPOINT", "saved", **saved)
    assert held.may_follow(crash())
    held.begin(crash())
    assert held.check() is None
    assert (held.restart, held.without_save) == (3, 1)
    told = json.loads(held.environment[START_VARIABLE])
    assert told["recovery"]["how"] == "in_place" and set(told["recovery"]["parts"]) == {"stop", "check"}
    lines = [json.loads(line)["data"] for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [line["restart"] for line in lines if "restart" in line] == [1, 2, 3]
    assert [line["why"].partition(" (")[0] for line in lines if "why" in line] == [
        "2 recoveries in a row without a new checkpoint"
    ]


def test_what_a_rank_printed_before_its_recovery_is_not_its_last_word(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("CUDA out of memory\nof this start\n")
    assert read_tail(log, since=len("CUDA out of memory\n")) == ["of this start"]


class Clock:
    """What a starter needs of a watch."""

    def __init__(self, *, stop: bool) -> None:
        self._stop = stop

    def asked(self) -> bool:
        return self._stop

    def beat(self, *, ranks: int) -> None: ...

    def sleep(self, *_: object) -> None:
        time.sleep(0.01)


def starter(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Starter:
    """Two ranks of `true`, with a fork server that is this shell program instead."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    server = ForkServer("train.json", os.environ, work=folder, folder=folder)
    return Starter(argv=["true"], environment=os.environ, numbers=range(2), work=folder, folder=folder, server=server)


@pytest.mark.spawns
def test_without_a_fork_server_ranks_are_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting = starter(tmp_path, "exit 1", monkeypatch)
    ranks = starting.start(Clock(stop=False), {})  # type: ignore[arg-type]
    while any(rank.process.poll() is None for rank in ranks):
        time.sleep(0.01)
    assert [(rank.number, rank.process.returncode) for rank in ranks] == [(0, 0), (1, 0)]
    assert starting.server is None


@pytest.mark.spawns
def test_a_stop_before_the_fork_is_a_stop_with_nothing_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting = starter(tmp_path, "exec sleep 60", monkeypatch)
    ranks = starting.start(Clock(stop=True), {})  # type: ignore[arg-type]
    assert [rank.process.poll() for rank in ranks] == [RESUMABLE_EXIT] * 2


def test_a_process_with_a_second_thread_is_not_forked() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert "threads" in (fork_server.find_fault() or "")
    finally:
        over.set()
        thread.join()


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
def test_killed_ranks_are_forked_again_in_the_same_attempt(node: Any) -> None:
    """Rank 1 inside a save, rank 0 in the first step after it, then to the end, from the memory that outlives both."""
    node.env |= {
        "TRAINMASTER_KILL_AT": "memory:local @3; step:backward 1;",
        "TRAINMASTER_KILL_RANK": "1; 0;",
        "TRAINMASTER_WITNESS": str(node.folder / "samples"),
        "TRAINMASTER_CHECK_EVENTS": "1",
    }
    memory = {"use": "on", "every_steps": 1, "folder": str(node.folder.parent / "memory")}
    checkpoint = {"every_steps": 100, "mode": "sync", "memory": memory}
    code, said = node.run(node.plan(ranks=2, train={**TRAIN, "checkpoint": checkpoint}))
    assert code == 0, said + (node.folder / "rank-0.log").read_text()
    assert node.record().exit_codes == {"0": 0, "1": 0}
    events = node.events()

    def named(phase: str, event: str) -> list[dict[str, Any]]:
        return [item["data"] for item in events if (item["phase"], item["event"]) == (phase, event)]

    begun, done = named("RECOVERY", "start"), named("RECOVERY", "done")
    assert [(data["rank"], data["reason"], data["restart"]) for data in begun] == [(1, "crashed", 1), (0, "crashed", 2)]
    # The second start was killed in its first step. Step 4 was in memory and not committed: it is not read.
    assert [(data["resumed_from"], data["tier"]) for data in done] == [(3, "memory")]
    assert [data["restart"] for data in named("START", "done")] == [0, 2]
    parts = {"stop", "check", "fork", "imports", "device", "rendezvous", "build", "load", "first_step"}
    assert set(done[0]["parts"]) == parts
    assert_same_run(named("STEP", "metrics"), node.folder / "samples")


def assert_same_run(told: list[dict[str, Any]], samples: Path) -> None:
    """Every step once, or again with the same loss, samples and seeds."""
    losses: dict[int, set[float]] = {}
    for data in told:
        losses.setdefault(data["step"], set()).add(data["loss"])
    assert sorted(losses) == list(range(1, 9)) and all(len(same) == 1 for same in losses.values()), losses
    drawn: dict[tuple[int, int], set[str]] = {}
    for path in samples.rglob("rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            drawn.setdefault((line["step"], line["first"]), set()).add(json.dumps([line["rows"], line["draws"]]))
    assert len(drawn) == 16 and all(len(same) == 1 for same in drawn.values()), "samples or seeds differ after a fork"


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
def test_several_nodes_recover_in_place_and_then_with_a_spare(nodes: list[Any]) -> None:
    """A rank of node 1 is killed in a step, then its agent: the attempt goes on, first there, then on the spare."""
    samples, port = nodes[0].folder / "samples", free_port("127.0.0.1")
    for node in nodes:
        node.env |= {
            "TRAINMASTER_KILL_AT": "step:backward @3; agent step:start @5;",
            "TRAINMASTER_KILL_RANK": "1; 1;",
            "TRAINMASTER_WITNESS": str(samples),
            "TRAINMASTER_CHECK_EVENTS": "1",
            "TRAINMASTER_MEMORY": str(node.folder.parent / f"memory-{node.number}"),  # what one has is lost with it
        }
        resources = {"nodes": 2, "spares": 1}
        node.start(node.plan(port=port, train=TRAIN, resources=resources))
    records = [nodes[number].over(limit_s=120.0) for number in (0, 2)]  # three imports of torch at once
    log = (nodes[0].folder / "rank-0.log").read_text()
    assert [(record.ok, record.exit_codes) for record in records] == [(True, {"0": 0}), (True, {"1": 0})], log
    assert not (nodes[1].folder / EXIT_FILE).exists(), "its agent was killed"
    events = nodes[0].events()

    def named(event: str) -> list[dict[str, Any]]:
        return [item["data"] for item in events if (item["phase"], item["event"]) == ("RECOVERY", event)]

    # Whether the loss of the node or of its peer was seen first, the spare has the place.
    assert [(data["how"], data["restart"]) for data in named("start")] == [("in_place", 1), ("spare", 2)], events
    assert (named("start")[0]["rank"], named("start")[0]["reason"]) == (1, "crashed")
    assert list(named("start")[1]["replaced"]) == ["1"]
    assert [(data["how"], data["resumed_from"]) for data in named("done")] == [("in_place", 2), ("spare", 4)]
    assert {"stop", "check", "agree", "fork", "first_step"} < set(named("done")[0]["parts"])
    silent = named("done")[1]["parts"]["silence"]
    assert named("done")[1]["seconds"] > silent > 0, "the time until the loss was sure counts"
    assert json.loads((nodes[0].folder / MEMBERS_FILE).read_text()) == [0, 2]
    assert_same_run([item["data"] for item in events if item["phase"] == "STEP"], samples)
    for node in nodes:
        mark = Plan.from_json((node.folder / PLAN_FILE).read_text()).mark
        node.until(lambda mark=mark: not living(mark), what="the end of every process")


def test_the_compiler_is_told_of_gpus_without_opening_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML and CUDA start a thread when they are asked, and a process with two threads must not be forked."""
    from torch import cuda

    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(fork_server, "_DRIVER", tmp_path / "nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    real = cuda.device_count
    with fork_server._without_driver():
        assert cuda.device_count() == 2
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert cuda.device_count() == 0
    assert cuda.device_count is real and "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


@pytest.mark.spawns
def test_a_fork_server_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, it takes requests and answers none; the first answer may take as long as its imports."""
    monkeypatch.setattr(agent_ranks, "_ANSWER_S", 0.2)
    starting = starter(tmp_path, "exec sleep 60", monkeypatch)
    starting.has_forked = True
    assert starting.server is not None
    os.kill(starting.server.pid, signal.SIGSTOP)
    began = time.monotonic()
    ranks = starting.start(Clock(stop=False), {})  # type: ignore[arg-type]
    while any(rank.process.poll() is None for rank in ranks):
        time.sleep(0.01)
    assert [rank.process.returncode for rank in ranks] == [0, 0] and starting.server is None
    assert time.monotonic() - began < 30
