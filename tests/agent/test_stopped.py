"""A rank that was stopped is told of within seconds, and so is that it goes on: as events, and to whoever asks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from trainmaster.remote import attempt_host

HERE = 'cd "$(dirname $TRAINMASTER_STOP)"; '
RANK = "echo $$ > pid; exec sleep 60"
BELOW = f"sh -c '{RANK}'; true"
LATEST_S = 6.0  # from the signal to the event; two to three seconds on an idle machine


def watched(node: Any, name: str) -> list[dict[str, Any]]:
    return [line for line in node.events() if (line["phase"], line["event"]) == ("WATCH", name)]


@pytest.mark.alone
@pytest.mark.parametrize("command", [RANK, BELOW], ids=["rank", "below"])
def test_a_stopped_rank_is_an_event_within_seconds(node: Any, command: str) -> None:
    """Before, only our trainer said so, after the time limit of its hang watchdog."""
    node.start(node.shell(HERE + command, ranks=1))
    pid = int(node.wait_for("pid"))
    os.kill(pid, signal.SIGSTOP)
    at = time.monotonic()
    node.until(lambda: watched(node, "stopped"), what="the event")
    assert time.monotonic() - at <= LATEST_S
    (event,) = watched(node, "stopped")
    assert (event["data"]["rank"], event["data"]["pid"]) == (0, pid)
    assert f"kill -CONT {pid}" in event["data"]["why"]
    os.kill(pid, signal.SIGCONT)
    node.until(lambda: watched(node, "continued"), what="the second event")
    (event,) = watched(node, "continued")
    assert event["data"]["seconds"] > 0 and len(watched(node, "stopped")) == 1


def test_a_rank_that_is_stopped_for_a_moment_is_no_event(node: Any) -> None:
    """As a profiler does it to read a stack. Told is what two looks find, a second apart; these lie within it."""
    node.start(node.shell(HERE + "echo $$ > pid; exec sleep 60"))
    pid = int(node.wait_for("pid"))
    for _ in range(4):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    time.sleep(1.5)  # until it has looked again
    assert watched(node, "stopped") == []


def test_a_stopped_rank_or_agent_is_told_to_whoever_asks_the_target(node: Any) -> None:
    agent = node.start(node.shell(HERE + "echo $$ > pid; exec sleep 60"))
    rank, lock = int(node.wait_for("pid")), node.folder / "agent.lock"
    assert attempt_host._find_stopped(lock) == ""
    os.kill(rank, signal.SIGSTOP)
    node.until(lambda: attempt_host._find_stopped(lock), what="the note")
    assert attempt_host._find_stopped(lock) == f"a rank (process {rank}) is stopped; `kill -CONT {rank}` lets it go on"
    os.kill(agent.pid, signal.SIGSTOP)
    node.until(lambda: "agent" in attempt_host._find_stopped(lock), what="the other note")
    assert f"its agent (process {agent.pid}) is stopped" in attempt_host._find_stopped(lock)
    os.kill(agent.pid, signal.SIGCONT)


def test_the_number_of_another_process_in_the_lock_says_nothing(tmp_path: Path) -> None:
    """An agent in a PID namespace writes the number that it has there."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    try:
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / "lock").write_text(f"pid {pid}\n")
        assert attempt_host._find_stopped(tmp_path / "lock") == ""
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
