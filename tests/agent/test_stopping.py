"""Stopping: asked for, in time or by force, on every way there is; and what the record says of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from trainmaster.agent import processes
from trainmaster.core.plan import ATTEMPT_VARIABLE
from trainmaster.core.states import Reason

HERE = 'cd "$(dirname $TRAINMASTER_STOP)"; '
POLITE = HERE + "trap 'echo saved; exit 75' TERM; echo up > up-$RANK; while :; do sleep 0.02; done"
STUBBORN = HERE + "trap '' TERM; echo $$ > up-$RANK; while :; do sleep 0.02; done"


def stop(node: Any, text: str) -> None:
    temporary = node.folder / "stop.tmp"
    temporary.write_text(text)
    temporary.rename(node.folder / "stop")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("user_cancelled", Reason.USER_CANCELLED),
        ("over_budget: 12 of 10 dollars", Reason.OVER_BUDGET),
        ("because I said so", Reason.USER_CANCELLED),
        ("", Reason.USER_CANCELLED),
    ],
)
def test_the_stop_file_gives_ranks_time_to_save(node: Any, text: str, reason: Reason) -> None:
    agent = node.start(node.shell(POLITE, ranks=2))
    node.wait_for("up-0"), node.wait_for("up-1")
    stop(node, text)
    assert agent.wait() == 75
    record = node.record()
    assert (record.ok, record.reason, record.resumable) == (False, reason, True)
    assert record.exit_codes == {"0": 75, "1": 75}
    assert text.partition(": ")[2] in record.message
    assert "saved" in (node.folder / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, Reason.PREEMPTED), (signal.SIGINT, Reason.USER_CANCELLED)]
)
def test_a_signal_to_the_agent_stops_the_ranks(node: Any, number: int, reason: Reason) -> None:
    agent = node.start(node.shell(POLITE))
    node.wait_for("up-0")
    agent.send_signal(number)
    assert agent.wait() == 75
    assert (node.record().reason, node.record().resumable) == (reason, True)


# The agent gets SIGTERM as soon as it has started a rank.
STOPPED_AFTER_EACH_RANK = """
import os, signal, sys
from trainmaster.agent import __main__ as agent, ranks
start = ranks.Starter._spawn
def spawn(self, number, more):
    process = start(self, number, more)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
ranks.Starter._spawn = spawn
sys.exit(agent.main(sys.argv[1:]))
"""


def test_a_stop_that_comes_between_two_ranks_starts_no_more_of_them(node: Any) -> None:
    plan = node.shell(HERE + "echo $$ > up-$RANK; exec sleep 600", ranks=3)
    env = {**node.env, ATTEMPT_VARIABLE: node.marks[plan]}
    argv = [sys.executable, "-c", STOPPED_AFTER_EACH_RANK, str(plan)]
    ended = subprocess.run(argv, env=env, check=False, capture_output=True, timeout=60)
    record = node.record()
    assert (ended.returncode, record.reason, list(record.exit_codes)) == (1, Reason.PREEMPTED, ["0"])
    assert not (node.folder / "rank-1.log").exists()
    assert not processes.living(node.marks[plan])


def test_a_rank_that_was_stopped_is_woken_to_save(node: Any) -> None:
    agent = node.start(node.shell(POLITE.replace("echo up >", "echo $$ >"), limits={"grace_s": 20}))
    pid = int(node.wait_for("up-0"))
    os.kill(pid, signal.SIGSTOP)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert node.record().exit_codes == {"0": 75}


def test_who_does_not_stop_in_time_is_killed(node: Any) -> None:
    agent = node.start(node.shell(STUBBORN, limits={"grace_s": 0.2}))
    pid = int(node.wait_for("up-0"))
    stop(node, "user_cancelled")
    assert agent.wait() == 1
    record = node.record()
    assert (record.reason, record.resumable, record.exit_codes) == (Reason.USER_CANCELLED, False, {"0": -9})
    assert "killed" in record.message
    assert not node.alive(pid)


@pytest.mark.alone  # a rank has part of a second to end by itself
def test_the_time_limit_stops_in_the_same_way(node: Any) -> None:
    code, _ = node.run(node.shell(POLITE, limits={"timeout_s": 0.5}))
    assert code == 75
    assert (node.record().reason, node.record().resumable) == (Reason.TIMED_OUT, True)
    assert "timeout_s" in node.record().message


@pytest.mark.alone  # a rank has part of a second to end by itself
def test_one_rank_that_cannot_be_saved_makes_the_attempt_not_resumable(node: Any) -> None:
    mixed = f"if [ $RANK = 0 ]; then {POLITE}; else {STUBBORN}; fi"
    agent = node.start(node.shell(mixed, ranks=2, limits={"grace_s": 0.2}))
    node.wait_for("up-0"), node.wait_for("up-1")
    stop(node, "user_cancelled")
    assert agent.wait() == 1
    assert node.record().exit_codes == {"0": 75, "1": -9}
    assert not node.record().resumable


def test_a_command_that_ends_with_0_when_stopped_has_not_finished(node: Any) -> None:
    agent = node.start(node.shell(POLITE.replace("75", "0")))
    node.wait_for("up-0")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait() == 1
    assert (node.record().ok, node.record().reason) == (False, Reason.PREEMPTED)


@pytest.mark.parametrize(("code", "resumable"), [(75, True), (0, False)])
def test_a_rank_that_sees_the_stop_file_first_was_still_asked(node: Any, code: int, resumable: bool) -> None:
    script = HERE + f"echo $$ > up-$RANK; while [ ! -e stop ]; do sleep 0.02; done; exit {code}"
    agent = node.start(node.shell(script))
    pid = int(node.wait_for("up-0"))
    agent.send_signal(signal.SIGSTOP)  # so that the rank is first
    stop(node, "over_budget")
    node.until(lambda: not node.alive(pid), what="the rank's end")
    agent.send_signal(signal.SIGCONT)
    agent.wait()
    assert (node.record().reason, node.record().resumable) == (Reason.OVER_BUDGET, resumable)


def test_ranks_told_to_stop_by_somebody_else_get_their_full_time(node: Any) -> None:
    script = (
        HERE
        + """
    if [ $RANK = 1 ]; then while [ ! -e up-0 ]; do sleep 0.02; done; exit 75; fi
    trap '' TERM; touch up-0; sleep 0.4; exit 75"""
    )
    code, _ = node.run(node.shell(script, ranks=2))
    assert code == 75
    record = node.record()
    assert (record.reason, record.resumable) == (Reason.PREEMPTED, True)
    assert record.exit_codes == {"0": 75, "1": 75}


def test_a_stop_before_the_start_starts_nothing(node: Any) -> None:
    plan = node.shell(HERE + "echo up > up")
    stop(node, "user_cancelled")
    assert node.run(plan)[0] == 1
    assert node.record().reason is Reason.USER_CANCELLED
    assert not (node.folder / "up").exists()
