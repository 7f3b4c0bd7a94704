"""Nothing of an attempt outlives it: not a rank of a killed agent, not a daemon a rank has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainmaster.node.owner import name_process

HERE = 'cd "$(dirname $TRAINMASTER_STOP)"; '
# A child in the rank's group; one in a session of its own; and one that has also lost its name.
FAMILY = HERE + (
    "sh -c 'echo $$ > child; sleep 60' & "
    "setsid sh -c 'echo $$ > daemon; sleep 60' & "
    "setsid env -i sh -c 'echo $$ > nameless; sleep 60' & "
    "while [ ! -s child ] || [ ! -s daemon ] || [ ! -s nameless ]; do sleep 0.02; done; "
)
NAMES = ("child", "daemon", "nameless")


def guard_of(agent: int) -> int:
    """The child of an agent that runs no program of its own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == agent and b"trainmaster.agent" in stat.with_name("cmdline").read_bytes():
                return int(stat.parent.name)
    raise AssertionError(f"agent {agent} has no guard")


def test_what_a_rank_leaves_behind_is_gone_before_the_record(node: Any) -> None:
    assert node.run(node.shell(FAMILY + "exit 0"))[0] == 0
    assert [name for name in NAMES if node.alive(int(node.wait_for(name)))] == []


def test_ranks_die_with_a_killed_agent(node: Any) -> None:
    agent = node.start(node.shell(HERE + "echo $$ > pid-$RANK; exec sleep 60", ranks=2))
    pids = [int(node.wait_for(f"pid-{rank}")) for rank in (0, 1)]
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    node.until(lambda: not any(node.alive(pid) for pid in pids), what="the ranks' death")
    assert not (node.folder / "exit.json").exists()


def test_kill_ends_the_agent_and_all_below_it(node: Any) -> None:
    plan = node.shell(FAMILY + "echo $$ > rank; wait")
    assert node.run(plan, "--detach") == (0, "")
    pids = [int(node.wait_for(name)) for name in (*NAMES, "rank")]
    assert node.run(plan, "--kill") == (0, "")
    assert [pid for pid in pids if node.alive(pid)] == []
    assert not (node.folder / "exit.json").exists()
    assert node.run(plan, "--kill") == (0, "")


def test_what_a_rank_has_started_ends_with_a_killed_agent(node: Any) -> None:
    """The kernel kills the rank; what is below it is ended by the agent's guard."""
    agent = node.start(node.shell(FAMILY + "wait"))
    pids = [int(node.wait_for(name)) for name in ("child", "daemon")]
    nameless, guard = int(node.wait_for("nameless")), guard_of(agent.pid)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    node.until(lambda: not any(node.alive(pid) for pid in pids), what="the end of what the rank had started")
    os.kill(nameless, signal.SIGKILL)  # "Not there yet" of docs/how/agent.md
    node.until(lambda: not node.alive(guard), what="the end of the guard")


def test_kill_finds_what_a_dead_agent_left(node: Any) -> None:
    agent = node.start(plan := node.shell(HERE + "setsid sh -c 'echo $$ > daemon; sleep 60' & wait"))
    daemon = int(node.wait_for("daemon"))
    for pid in (guard_of(agent.pid), agent.pid):
        os.kill(pid, signal.SIGKILL)
    agent.wait()
    assert node.alive(daemon)  # else the next line would show nothing
    assert node.run(plan, "--kill") == (0, "")
    assert not node.alive(daemon)


@pytest.mark.parametrize("rank", ["trap 'echo saved > saved; exit 75' TERM", "trap '' TERM"], ids=["saves", "deaf"])
def test_an_agent_ends_with_the_command_that_owns_it(node: Any, rank: str) -> None:
    """After SIGKILL of `trainmaster train` its agent and ranks went on and held the GPU."""
    owner = subprocess.Popen(["sleep", "600"])
    node.env["TRAINMASTER_OWNER"] = name_process(owner.pid)
    agent = node.start(node.shell(f"{HERE}{rank}; echo $$ > pid; while :; do sleep 0.1; done", limits={"grace_s": 600}))
    pid = int(node.wait_for("pid"))
    owner.kill()
    owner.wait()
    record = node.over()  # well within the grace of ten minutes
    assert agent.wait() == (75 if "saved" in rank else 1)
    assert (record.reason, record.resumable) == ("user_cancelled", "saved" in rank)
    assert "the command that started it was killed" in record.message
    assert not node.alive(pid)


def test_kill_spares_other_attempts(node: Any) -> None:
    os.environ["TRAINMASTER_ATTEMPT"] = "another.1"
    try:
        other = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
    finally:
        del os.environ["TRAINMASTER_ATTEMPT"]
    try:
        assert node.run(node.shell("true"), "--kill") == (0, "")
        assert node.alive(other)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def test_a_killed_attempt_never_begins(node: Any) -> None:
    plan = node.shell(HERE + "echo up > up")
    node.run(plan, "--kill")
    for options in ((), ("--detach",)):
        code, said = node.run(plan, *options)
        assert code == 1
        assert "released before its start" in said
    assert not (node.folder / "up").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system, which needs root")
def test_a_full_disk_still_gets_its_record(node: Any) -> None:
    node.folder.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", node.folder], check=False).returncode:
        pytest.skip("this machine lets even root mount nothing")
    try:
        assert node.run(node.shell(HERE + "cat /dev/zero > filler"))[0] == 1
        assert (node.folder / "filler").stat().st_size > 0
        assert node.record().reason.value == "disk_full"
        assert node.record().evidence["last_lines"] == []  # the rank could not even say it
    finally:
        subprocess.run(["umount", "-l", node.folder], check=True)
