"""Nothing of an attempt outlives it: not a rank of a killed agent, not a daemon a rank has started."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

HERE = 'cd "$(dirname $TRAINMASTER_STOP)"; '
# A child in the rank's group; one in a session of its own; and one that has also lost its name.
FAMILY = HERE + (
    "sh -c 'echo $$ > child; sleep 60' & "
    "setsid sh -c 'echo $$ > daemon; sleep 60' & "
    "setsid env -i sh -c 'echo $$ > nameless; sleep 60' & "
    "while [ ! -s child ] || [ ! -s daemon ] || [ ! -s nameless ]; do sleep 0.02; done; "
)
NAMES = ("child", "daemon", "nameless")


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


def test_kill_finds_what_a_dead_agent_left(node: Any) -> None:
    agent = node.start(plan := node.shell(HERE + "setsid sh -c 'echo $$ > daemon; sleep 60' & wait"))
    daemon = int(node.wait_for("daemon"))
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    assert node.alive(daemon)  # else the next line would show nothing
    assert node.run(plan, "--kill") == (0, "")
    assert not node.alive(daemon)


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
