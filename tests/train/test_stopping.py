"""Told to stop: by a signal to one rank, or by a file. It saves that very step, exits 75, and can go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fork_server import ForkServer

from .runs import TINY, Ranks, RunHere, Start, StopAfter, tiny

ENDLESS = tiny(steps=1_000_000, epoch_steps=1_000_000, checkpoint={"every_steps": 1_000_000})


def send(number: signal.Signals) -> Callable[[Ranks], None]:
    # To rank 1 alone: the others must hear of it from each other.
    return lambda ranks: ranks.processes[1].send_signal(number)


def lay_the_file(ranks: Ranks) -> None:
    (ranks.folder / "stop").write_text("user_cancelled")


@pytest.mark.matrix(one_in=2)
@pytest.mark.parametrize(
    "ask",
    [send(signal.SIGTERM), send(signal.SIGUSR1), send(signal.SIGINT), send(signal.SIGHUP), lay_the_file],
    ids=["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "stop file"],
)
def test_all_ranks_save_the_same_step_and_can_go_on(
    start: Start, run_here: RunHere, tmp_path: Path, ask: Callable[[Ranks], None]
) -> None:
    ranks = start(tmp_path, ENDLESS, ranks=2)
    ranks.wait_for("STEP", "metrics", step=3)
    ask(ranks)
    ran = ranks.finish()
    assert ran.codes == [75, 75], ran.output
    (end,) = ran.named("TRAINING", "end")
    last = end["data"]["step"]
    assert end["data"]["stopped"] is True
    assert last == max(ran.losses)
    assert ran.checkpoints == [f"step-{last:08d}"]
    assert ran.manifest(last)["state"]["cursor"] == 8 * last
    again = run_here(tmp_path, tiny(steps=last + 2))
    assert again.named("TRAINING", "start")[-1]["data"]["resumed_from"] == last
    assert sorted(again.losses) == list(range(1, last + 3))


@pytest.mark.alone
def test_a_rank_that_waits_for_its_peers_hears_sigterm_within_a_second(programs: ForkServer, tmp_path: Path) -> None:
    """Torch waits there without running a signal's handler: it went on until its time was over."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with socket.socket() as master, (tmp_path / "log").open("wb") as log:
        master.bind(("127.0.0.1", 0))
        master.listen()
        ours = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        ours["MASTER_PORT"] = master.getsockname()[1]
        env = {**os.environ, **{name: str(value) for name, value in ours.items()}}
        words = ("trainmaster.train", str(tmp_path / "config.json"))
        rank = programs.start(*words, env=env, out=log.fileno(), err=log.fileno())
        connection, _ = master.accept()  # it asks for the store, and gets no answer
        with connection:
            asked = time.monotonic()
            rank.send_signal(signal.SIGTERM)
            assert rank.wait(timeout=60) == 75, (tmp_path / "log").read_text()
            assert time.monotonic() - asked < 1.0


def test_a_stop_inside_an_evaluation_saves_and_the_evaluation_is_made_up_for(run_here: RunHere, tmp_path: Path) -> None:
    config = tiny(steps=8, epoch_steps=4, eval_sequences=16)
    # Asked once before each of four steps, then before the first half of the evaluation; the second half is too late.
    ran = run_here(tmp_path, config, stop=StopAfter(5))
    assert ran.checkpoints == ["step-00000004"]
    assert not ran.named("EVAL_MODEL", "metrics")
    assert not ran.named("TRAINING", "epoch_complete")
    again = run_here(tmp_path, config)
    assert [item["data"]["step"] for item in again.named("EVAL_MODEL", "metrics")] == [4, 8]
    assert [item["epoch"] for item in again.named("TRAINING", "epoch_complete")] == [1, 2]
    assert [item["data"]["step"] for item in again.named("STEP", "metrics")] == list(range(1, 9))


def test_a_stop_right_after_a_resume_saves_nothing_new(run_here: RunHere, tmp_path: Path) -> None:
    run_here(tmp_path, tiny(steps=4))
    ran = run_here(tmp_path, tiny(steps=8), stop=StopAfter(0))
    assert ran.checkpoints == ["step-00000004"]
    assert len(ran.named("CHECKPOINT", "saved")) == 1
    assert ran.named("TRAINING", "end")[-1]["data"]["stopped"] is True


def test_a_stop_inside_a_save_lets_it_end_and_saves_what_came_after(start: Start, tmp_path: Path) -> None:
    config = tiny(steps=1_000_000, epoch_steps=1_000_000, checkpoint={"every_steps": 3})
    ran = start(tmp_path, config, env={"TRAINMASTER_TERM_AT": "save:shards 1"}).finish()
    assert ran.codes == [75], ran.output
    last = ran.named("TRAINING", "end")[0]["data"]["step"]
    steps = [item["data"]["step"] for item in ran.named("CHECKPOINT", "saved")]
    assert steps == sorted({3, last})
    assert not ran.named("CHECKPOINT", "failed")
