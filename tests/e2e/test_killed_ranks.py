"""A rank is killed with SIGKILL at seeded moments: the run resumes each time, with the losses of an undisturbed run.

As a job, in place and with `attempts: 3`, and under `torchrun --max-restarts`. TRAINMASTER_KILL_MOMENTS sets how many
moments are drawn (`make rank-kills` draws twelve, `make test` one); two of them strike one run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer
from train.runs import Ranks
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.schema import build
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database

SOURCE = str(Path(__file__).parents[2] / "src")
STEPS, RANKS, PER_RUN = 28, 2, 2
CONFIG: dict[str, Any] = {
    "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 64},
    "optimizer": {"warmup_steps": 2},
    "steps": STEPS, "epoch_steps": 8, "batch_sequences": 8, "eval_sequences": 8, "sequence_tokens": 32,
    "device": "cpu", "checkpoint": {"every_steps": 2},
}  # fmt: skip
MOMENTS = int(os.environ.get("TRAINMASTER_KILL_MOMENTS", "1"))


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a rank is killed: so many seconds after a step was told."""

    step: int
    rank: int
    later_s: float


def draw(count: int, seed: int = 12) -> list[tuple[Moment, ...]]:
    """Moments by run: the first in its first half, the second in its second."""
    dice = random.Random(seed)
    found = []
    for number in range(count):
        step = dice.randint(3, 7) if number % PER_RUN == 0 else dice.randint(10, 16)
        found.append(Moment(step=step, rank=dice.randrange(RANKS), later_s=dice.uniform(0, 0.05)))
    return [tuple(found[start : start + PER_RUN]) for start in range(0, count, PER_RUN)]


RUNS = draw(MOMENTS)


def events(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def data_of(found: list[dict[str, Any]], phase: str, event: str) -> list[dict[str, Any]]:
    return [item["data"] for item in found if (item["phase"], item["event"]) == (phase, event)]


def pids(mark: str, rank: int) -> list[int]:
    """Processes with this text in their environment, of this rank."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "environ").read_bytes().split(b"\0") if folder.name.isdigit() else []
        except OSError:
            continue
        if mark.encode() in words and f"RANK={rank}".encode() in words:
            found.append(int(folder.name))
    return found


class Killer:
    """Kills a rank at each moment in turn, once the run that must be hit has told the step."""

    def __init__(self, moments: tuple[Moment, ...]) -> None:
        self.left = list(moments)

    def look(self, path: Path, mark: str, starts: int) -> None:
        """`starts`: how often training must have begun in this file before the next kill."""
        if not self.left:
            return
        found, moment = events(path), self.left[0]
        told = [data["step"] for data in data_of(found, "STEP", "metrics")]
        if len(data_of(found, "TRAINING", "start")) < starts or max(told, default=0) < moment.step:
            return
        time.sleep(moment.later_s)
        (pid,) = pids(mark, moment.rank)
        os.kill(pid, signal.SIGKILL)
        self.left.pop(0)


@pytest.fixture(scope="module")
def undisturbed(programs: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Loss of every step of the same run without a kill."""
    ran = Ranks(programs, tmp_path_factory.mktemp("undisturbed"), build(TrainConfig, CONFIG), ranks=RANKS).finish()
    assert ran.codes == [0] * RANKS, ran.output
    told = data_of(ran.events, "STEP", "metrics")
    assert [data["step"] for data in told] == list(range(1, STEPS + 1))
    return {data["step"]: data["loss"] for data in told}


def torchrun(folder: Path, *, restarts: int, config: dict[str, Any] = CONFIG) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", str(restarts),
        "--master-addr", "127.0.0.1", "--master-port", str(port), "--monitor-interval", "0.1",
        "-m", "trainmaster.train", str(folder / "config.json"),
    ]  # fmt: skip
    ours = {"TRAINMASTER_EVENTS": folder / "events.jsonl", "TRAINMASTER_CHECKPOINTS": folder / "checkpoints"}
    env = {**os.environ, "PYTHONPATH": SOURCE, **{name: str(value) for name, value in ours.items()}}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def check(found: list[dict[str, Any]], kills: int, undisturbed: dict[int, float]) -> None:
    """Every start after a kill resumed, and every step of every attempt has the loss of the undisturbed run."""
    first, *others = data_of(found, "TRAINING", "start")
    assert first["resumed_from"] is None
    assert len(others) == kills and all(start["resumed_from"] for start in others), others
    told = data_of(found, "STEP", "metrics")
    assert {data["step"] for data in told} == set(undisturbed)
    assert [(data["step"], data["loss"]) for data in told if data["loss"] != undisturbed[data["step"]]] == []


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moments", RUNS, ids=str)
def test_torchrun_restarts_resume(moments: tuple[Moment, ...], undisturbed: dict[int, float], tmp_path: Path) -> None:
    folder, killer = tmp_path / "run", Killer(moments)
    process = torchrun(folder, restarts=len(moments))
    try:
        mark = f"TRAINMASTER_EVENTS={folder / 'events.jsonl'}"
        while process.poll() is None:
            killer.look(folder / "events.jsonl", mark, starts=1 + len(moments) - len(killer.left))
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0, (folder / "log").read_text()
    check(events(folder / "events.jsonl"), len(moments), undisturbed)


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("moments", RUNS, ids=str)
def test_a_job_resumes_in_place_or_in_its_next_attempt(
    moments: tuple[Moment, ...],
    in_place: bool,
    undisturbed: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    db, killer = open_database(tmp_path / "trainmaster.db"), Killer(moments)
    train = {**CONFIG, "recovery": {"in_place": in_place}}
    spec = {
        "name": "killed", "train": train, "resources": {"processes_per_node": RANKS}, "preflight": {"level": 0},
        "limits": {"attempts": 3},
    }  # fmt: skip
    job = submitting.submit(db, parse_spec(spec))
    folder = tmp_path / "jobs" / job.id / "attempts"

    async def drive() -> None:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconcile.run(db, tmp_path, stop=stop, tick_s=0.1))
        while not (now := find_job(db, job.id)).status.final:  # type: ignore[union-attr]
            begun = 1 + len(moments) - len(killer.left)
            number, starts = (1, begun) if in_place else (begun, 1)
            path = folder / str(number) / "events.jsonl"
            killer.look(path, f"TRAINMASTER_ATTEMPT={job.id}.{number}", starts=starts)
            await asyncio.sleep(0.05)
        stop.set()
        await loop
        attempts = 1 if in_place else 1 + len(moments)
        assert (now.status, now.attempts) == (Status.COMPLETED, attempts), (now.reason, now.message)

    try:
        asyncio.run(drive())
    finally:
        db.close()
    files = [folder / str(number + 1) / "events.jsonl" for number in range(1 + len(moments))]
    check(events(*files), len(moments), undisturbed)
