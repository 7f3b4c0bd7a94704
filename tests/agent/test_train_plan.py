"""The whole node half: checks, then our trainer on two ranks, through the local target, to its record and back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import trainmaster
from trainmaster import targets
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, TargetState

TRAIN = {
    "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn_width": 32},
    "optimizer": {"warmup_steps": 1},
    "checkpoint": {"every_steps": 2},
    "steps": 4,
    "epoch_steps": 4,
    "batch_sequences": 4,
    "sequence_tokens": 16,
    "eval_sequences": 2,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(trainmaster.__file__).parents[1]))


def place(job: Path, number: int, **train: Any) -> targets.Placement:
    mapping = {
        "name": "tiny",
        "resources": {"processes_per_node": 2},
        "preflight": {"level": 1},
        "train": {**TRAIN, **train},
    }
    return targets.Placement(attempt=f"{job.name}.{number}", spec=parse_spec(mapping), job_folder=job)


async def read_events(target: targets.Target, handle: targets.Handle) -> list[dict[str, Any]]:
    raw = await target.read(handle, EVENTS_FILE, offset=0, limit=1 << 20)
    return [json.loads(line) for line in raw.splitlines()]


async def wait_until_over(target: targets.Target, handle: targets.Handle) -> targets.Poll:
    while not (poll := await target.poll(handle)).state.over:
        assert poll.state is TargetState.RUNNING
        await asyncio.sleep(0.1)
    return poll


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
def test_checks_then_two_ranks_train_to_the_end(tmp_path: Path) -> None:
    async def go() -> None:
        target = targets.load("local")
        handle = await target.submit(target.plan(place(tmp_path, 1)))
        poll = await wait_until_over(target, handle)
        assert (poll.state, poll.exit and poll.exit.exit_codes) == (TargetState.SUCCEEDED, {"0": 0, "1": 0}), poll
        names = [f"{event['phase']} {event['event']}" for event in await read_events(target, handle)]
        order = ("PROJECT start", "PREFLIGHT start", "PREFLIGHT end", "TRAINING start", "TRAINING end", "PROJECT end")
        assert [name for name in names if name in order] == list(order)
        assert names.count("STEP metrics") == 4
        assert (tmp_path / "checkpoints").is_dir()
        await target.release(handle)

    asyncio.run(go())


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
def test_cancelled_it_saves_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    async def go() -> None:
        target = targets.load("local")
        handle = await target.submit(target.plan(place(tmp_path, 1, steps=100_000, epoch_steps=100_000)))
        while not any(event["phase"] == "STEP" for event in await read_events(target, handle)):
            assert (await target.poll(handle)).state is TargetState.RUNNING
            await asyncio.sleep(0.1)
        await target.cancel(handle, reason=Reason.USER_CANCELLED)
        poll = await wait_until_over(target, handle)
        assert poll.exit is not None
        assert (poll.exit.reason, poll.exit.resumable) == (Reason.USER_CANCELLED, True), poll
        await target.release(handle)
        saved = [event["data"]["step"] for event in await read_events(target, handle) if event["event"] == "saved"]

        handle = await target.submit(target.plan(place(tmp_path, 2, steps=100_000, epoch_steps=100_000)))
        while not (begun := [e for e in await read_events(target, handle) if e["phase"] == "TRAINING"]):
            assert (await target.poll(handle)).state is TargetState.RUNNING
            await asyncio.sleep(0.1)
        assert begun[0]["data"]["resumed_from"] == saved[-1]
        await target.release(handle)
        assert (await target.poll(handle)).state is TargetState.LOST

    asyncio.run(go())
