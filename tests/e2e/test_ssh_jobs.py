"""Jobs on machines behind real OpenSSH servers, through the control plane: lose a machine, go on with a spare."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fork_server import ForkServer
from reconciling import drive, running
from sshd import Lab, lab, needs_sshd
from train.runs import Ranks
from trainmaster.control import reap
from trainmaster.control import submit as submitting
from trainmaster.control.log_view import logs
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.plan import ATTEMPT_VARIABLE, EVENTS_FILE, node_file
from trainmaster.core.schema import build
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.storage import open_store
from trainmaster.store import attempts, events, nodes
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow
from trainmaster.train.checkpoint.tiers.memory import FOLDER_VARIABLE

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(600)]

STEPS = 60
CONFIG = {
    "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 64},
    "steps": STEPS, "epoch_steps": STEPS, "batch_sequences": 8, "eval_sequences": 0, "sequence_tokens": 32,
    "device": "cpu", "checkpoint": {"every_steps": 10, "mode": "sync", "lease_s": 2.0},
}  # fmt: skip


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Lab]:
    (tmp_path / "lab").mkdir()
    with lab(tmp_path / "lab") as made:
        for name in ("n1", "n2", "n3"):
            made.start(name, environment={FOLDER_VARIABLE: str(tmp_path / "memory" / name)})
        made.wait()
        yield made


@pytest.fixture
def target(machines: Lab, tmp_path: Path) -> str:
    return machines.write_hosts(tmp_path / "hosts.yaml", folder=str(tmp_path / "shared"), lost_after_s=1.0)


def processes_of(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{ATTEMPT_VARIABLE}={mark}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def losses(db: Database, job_id: str) -> dict[int, set[float]]:
    """Every loss that any attempt reported, by step."""
    found: dict[int, set[float]] = {}
    for row in events.list_events(db, job_id, phase="STEP", limit=100_000):
        if row.event == "metrics":
            found.setdefault(int(row.data["step"]), set()).add(float(row.data["loss"]))
    return found


@pytest.fixture(scope="module")
def undisturbed(programs: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[float]]:
    """Loss of every step of the same run on one machine, without a fault."""
    ran = Ranks(programs, tmp_path_factory.mktemp("undisturbed"), build(TrainConfig, CONFIG), ranks=2).finish()
    assert ran.codes == [0, 0], ran.output
    assert sorted(ran.losses) == list(range(1, STEPS + 1))
    return {step: {loss} for step, loss in ran.losses.items()}


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_killed_rank_is_recovered_in_place_and_a_lost_machine_by_a_spare(
    db: Database,
    tmp_path: Path,
    machines: Lab,
    target: str,
    undisturbed: dict[int, set[float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one attempt: a rank of the second machine is killed in a step, then that machine is switched off."""
    env = {"TRAINMASTER_KILL_AT": "step:backward @12;", "TRAINMASTER_KILL_RANK": "1;"}
    spec = {
        "name": "pair", "target": target, "train": CONFIG, "resources": {"nodes": 2, "spares": 1}, "env": env,
        "preflight": {"level": 1, "allow_incomplete": True},
    }  # fmt: skip
    job = submitting.submit(db, parse_spec(spec))
    lost: list[str] = []

    def lose(_: JobRow) -> None:
        """Once the first recovery is done: no process, no server, and what it had in memory is gone."""
        first = list((tmp_path / "shared" / "jobs" / job.id / "attempts").glob("1-*/events.jsonl"))
        if not lost and any('"RECOVERY","event":"done"' in file.read_text() for file in first):
            (attempt,) = attempts.list_attempts(db, job.id)
            assert attempt.handle is not None
            lost.append(attempt.handle["nodes"][1])
            next(host for host in machines.hosts if host.name == lost[0]).cut(also_server=True)
            for pid in processes_of(f"{job.id}.1/1"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(tmp_path / "memory" / lost[0])

    ended = drive(db, tmp_path, job, lose)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    (attempt,) = attempts.list_attempts(db, job.id)
    assert attempt.handle is not None and lost and attempt.handle["spares"] == 1
    told = list(events.list_events(db, job.id, phase="RECOVERY", limit=100))
    begun = [row.data for row in told if row.event == "start"]
    done = [row.data for row in told if row.event == "done"]
    assert [(data["how"], data["restart"]) for data in begun] == [("in_place", 1), ("spare", 2)], told
    assert begun[0]["reason"] == "crashed" and begun[0]["rank"] == 1 and list(begun[1]["replaced"]) == ["1"]
    assert [data["restart"] for data in done] == [1, 2]
    assert losses(db, job.id) == undisturbed
    # Every machine was checked once, the spare too, and nothing again for the recoveries.
    for node in range(3):
        stream = node_file(EVENTS_FILE, node)
        checked = events.list_events(db, job.id, phase="PREFLIGHT", limit=1000, stream=stream)
        assert [row.event for row in checked if row.event != "check"] == ["start", "end"], stream
    names = [stream.stream for stream in asyncio.run(logs.list_streams(db, ended, [attempt]))]
    assert {"rank-0.log", "rank-1.node-2.log", "agent.node-2.log"} < set(names)
    for node in range(3):
        assert processes_of(f"{job.id}.1/{node}") == []
    with capsys.disabled():
        stops = ", ".join(f"{data['how']} {data['seconds']:.1f} s {data['parts']}" for data in done)
        print(f"\nfrom the failure to the next step: {stops}")


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_lost_machine_is_replaced_in_the_next_attempt_and_the_run_is_the_same(
    db: Database,
    tmp_path: Path,
    machines: Lab,
    target: str,
    undisturbed: dict[int, set[float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = {
        "name": "pair", "target": target, "train": CONFIG, "resources": {"nodes": 2}, "preflight": {"level": 0},
        "limits": {"attempts": 4},
    }  # fmt: skip
    job = submitting.submit(db, parse_spec(spec))
    lost: list[float] = []
    back: list[float] = []

    def lose(now: JobRow) -> None:
        """Switch the second machine off once something was saved: no process, no server."""
        number = now.attempts
        saved = (tmp_path / "shared" / "jobs" / job.id / "checkpoints").glob("step-*0/manifest.json")
        if not lost and any(saved):
            (attempt,) = attempts.list_attempts(db, job.id)
            assert attempt.handle is not None
            second = attempt.handle["nodes"][1]
            next(host for host in machines.hosts if host.name == second).cut(also_server=True)
            for pid in processes_of(f"{job.id}.{number}/1"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            lost.append(time.monotonic())
        if lost and not back and number > 1:
            for file in (tmp_path / "shared" / "jobs" / job.id / "attempts").glob(f"{number}-*/events.jsonl"):
                if not back and '"STEP"' in file.read_text():
                    back.append(time.monotonic())

    ended = drive(db, tmp_path, job, lose)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    tried = attempts.list_attempts(db, job.id)
    assert tried[0].handle is not None and tried[-1].handle is not None
    dead, spares = tried[0].handle["nodes"][1], tried[-1].handle["nodes"]
    assert len(tried) > 1 and len(spares) == 2 and dead not in spares
    assert losses(db, job.id) == undisturbed  # every step of every attempt has the loss of the undisturbed run
    with capsys.disabled():
        print(f"\na machine lost; {back[0] - lost[0]:.1f} s until the next training step on another")


@pytest.mark.matrix(one_in=5, of="jobs over SSH")
def test_what_a_machine_still_runs_when_it_is_back_is_ended(
    db: Database, tmp_path: Path, machines: Lab, target: str
) -> None:
    hosts = yaml.safe_load((tmp_path / "hosts.yaml").read_text())
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump({**hosts, "hosts": hosts["hosts"][:1]}))
    spec = {"name": "solo", "target": target, "command": ["sleep", "600"], "preflight": {"level": 0}}
    job = submitting.submit(db, parse_spec(spec))
    frozen: list[int] = []

    def cut(now: JobRow) -> None:
        if not frozen and now.status is Status.RUNNING and processes_of(f"{job.id}.1"):
            machines.hosts[0].cut(also_server=True)
            frozen.append(1)

    ended = drive(db, tmp_path, job, cut)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.NODE_LOST), ended.message
    assert processes_of(f"{job.id}.1")
    port = machines.hosts[0].port
    again = machines.start("n1-again")
    machines.wait(again)
    text = (tmp_path / "hosts.yaml").read_text().replace(f"port: {port}", f"port: {again.port}")
    (tmp_path / "hosts.yaml").write_text(text)
    (left,) = asyncio.run(reap.sweep(db, tmp_path))
    assert left.attempt == f"{job.id}.1" and left.why == "its job is failed"
    assert processes_of(f"{job.id}.1") == []
    assert asyncio.run(reap.sweep(db, tmp_path)) == []


@pytest.mark.matrix(one_in=5, of="jobs over SSH")
def test_a_followed_job_ends_without_a_word_about_connections(tmp_path: Path, target: str) -> None:
    (tmp_path / "job.yaml").write_text("name: a\ncommand: ['true']\npreflight: { level: 0 }\n")
    words = ["submit", "job.yaml", "--on", target, "--follow", "--workdir", "none", "--home", "home"]
    done = subprocess.run(
        [sys.executable, "-m", "trainmaster", *words], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Task was destroyed" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.matrix(one_in=5, of="jobs over SSH")
def test_many_small_outputs_are_collected_in_few_requests(db: Database, tmp_path: Path, target: str) -> None:
    script = "mkdir -p $TRAINMASTER_OUTPUTS/d; for i in $(seq 700); do echo $RANK-$i > $TRAINMASTER_OUTPUTS/d/$i; done"
    big = "head -c 20000000 /dev/urandom > $TRAINMASTER_OUTPUTS/big; sha256sum < $TRAINMASTER_OUTPUTS/big"
    spec = {"name": "many", "target": target, "command": ["sh", "-c", f"{script}; {big}"], "resources": {"nodes": 2}}
    job = submitting.submit(db, parse_spec({**spec, "preflight": {"level": 0}}))
    ended = drive(db, tmp_path, job, lambda _: None)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    store = open_store(tmp_path / "storage")
    for rank, folder in enumerate(("outputs", "outputs/node-1")):
        assert all(store.get(f"jobs/{job.id}/{folder}/d/{i}") == f"{rank}-{i}\n".encode() for i in range(1, 701))
        digest = hashlib.sha256(store.get(f"jobs/{job.id}/{folder}/big")).hexdigest()
        assert store.get(f"jobs/{job.id}/attempts/1/rank-{rank}.log").split()[0].decode() == digest


@pytest.mark.matrix(one_in=5, of="jobs over SSH")
def test_events_and_logs_of_every_node_arrive_while_it_runs_and_once(db: Database, tmp_path: Path, target: str) -> None:
    line = '{"v":1,"phase":"STEP","event":"metrics","data":{"rank":\'$RANK\',"part":%s}}'
    check = '{"v":1,"phase":"PREFLIGHT","event":"check","data":{"check":"cpu","verdict":"pass"}}'
    script = (
        f"echo '{check}' >> $TRAINMASTER_EVENTS; echo '{line % 1}' >> $TRAINMASTER_EVENTS; echo first from $RANK; "
        f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; "
        f"for i in $(seq 300); do echo '{line % 2}' >> $TRAINMASTER_EVENTS; done"
    )
    spec = {"name": "pair", "target": target, "command": ["sh", "-c", script], "resources": {"nodes": 2}}
    job = submitting.submit(db, parse_spec({**spec, "preflight": {"level": 0}}))
    storage = open_store(tmp_path / "storage")

    def parts(node: int) -> list[int]:
        rows = events.list_events(db, job.id, phase="STEP", limit=10_000, stream=node_file(EVENTS_FILE, node))
        assert {row.data["rank"] for row in rows} <= {node}
        return [row.data["part"] for row in rows]

    async def watch() -> None:
        """One control plane ends while the nodes wait; the next one goes on from the stored offsets."""
        async with running(db, tmp_path):
            while parts(0) != [1] or parts(1) != [1]:  # noqa: ASYNC110 (rows have no event)
                await asyncio.sleep(0.05)
            now, (attempt,) = find_job(db, job.id), attempts.list_attempts(db, job.id)
            assert now is not None and now.status is Status.RUNNING
            log = await logs.read(db, storage, now, attempt, "rank-1.log", offset=0, limit=99)
            agent = await logs.read(db, storage, now, attempt, "agent.node-1.log", offset=0, limit=9999)
            assert log == b"first from 1\n" and b"starting 1 ranks" in agent
        (tmp_path / "go").touch()

    asyncio.run(watch())
    ended = drive(db, tmp_path, job, lambda _: None)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    for node in (0, 1):
        assert parts(node) == [1] + [2] * 300
        kept = storage.get(f"jobs/{job.id}/attempts/1/{node_file(EVENTS_FILE, node)}")
        rows = events.list_events(db, job.id, limit=10_000, stream=node_file(EVENTS_FILE, node))
        assert [row.offset for row in rows] == [at.start() for at in re.finditer(rb"(?m)^", kept[:-1])]
        assert [(row.phase, row.event) for row in (rows[0], rows[-1])] == [("PROJECT", "start"), ("PROJECT", "end")]
    names = [stream.stream for stream in asyncio.run(logs.list_streams(db, ended, attempts.list_attempts(db, job.id)))]
    assert {"agent.node-1.log", "events.node-1.jsonl", "exit.node-1.json"} < set(names)
    assert [row.check for row in nodes.list_checks(db, job.id)] == ["cpu", "cpu"]  # the check of each node


@pytest.mark.matrix(one_in=5, of="jobs over SSH")
def test_jobs_wait_for_a_free_machine_and_all_complete(db: Database, tmp_path: Path, target: str) -> None:
    spec = {"name": "many", "target": target, "command": ["sh", "-c", "sleep 0.2; echo $$ > $TRAINMASTER_OUTPUTS/pid"]}
    jobs = [submitting.submit(db, parse_spec({**spec, "preflight": {"level": 0}})) for _ in range(7)]
    messages: set[str] = set()

    def look(_: JobRow) -> None:
        messages.update(row.message for job in jobs if (row := find_job(db, job.id)) is not None)

    for job in jobs:
        ended = drive(db, tmp_path, job, look)
        assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    assert any("waiting for 1 free machine:" in text for text in messages), messages
    store = open_store(tmp_path / "storage")
    kept = [item.path for item in store.list() if item.path.endswith("/outputs/pid")]
    assert len(kept) == len(jobs), json.dumps(sorted(item.path for item in store.list()))
