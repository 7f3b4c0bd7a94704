"""An attempt begins once: not beside a living agent, not after a dead one, not after its end."""

from __future__ import annotations

import fcntl
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from agent.test_nothing_left import guard_of
from trainmaster.agent.folder import AttemptFolder, Refused
from trainmaster.core.plan import LOCK_FILE


def test_a_second_agent_starts_nothing_while_the_first_lives(node: Any) -> None:
    plan = node.shell(
        'cd "$(dirname $TRAINMASTER_STOP)"; echo started >> count; while [ ! -e go ]; do sleep 0.02; done'
    )
    first = node.start(plan)
    node.wait_for("count")
    code, said = node.run(plan)
    assert code == 1
    assert "another agent runs this attempt" in said
    code, said = node.run(plan, "--detach")
    assert code == 1
    assert "another agent runs this attempt" in said
    (node.folder / "go").touch()
    assert first.wait() == 0
    assert (node.folder / "count").read_text() == "started\n"


@pytest.mark.proof
def test_an_attempt_that_is_over_stays_as_it_ended(node: Any) -> None:
    plan = node.shell('echo started >> "$(dirname $TRAINMASTER_STOP)/count"; exit 3')
    node.run(plan)
    before = {path.name: path.read_bytes() for path in node.folder.rglob("*") if path.is_file()}
    code, said = node.run(plan)
    assert code == 1
    assert "the attempt is over" in said
    assert node.run(plan, "--detach") == (0, "")
    assert {path.name: path.read_bytes() for path in node.folder.rglob("*") if path.is_file()} == before


def test_an_attempt_whose_agent_was_killed_does_not_begin_again(node: Any) -> None:
    plan = node.shell('echo started >> "$(dirname $TRAINMASTER_STOP)/count"; sleep 60')
    agent = node.start(plan)
    node.wait_for("count")
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    code, said = node.run(plan)
    assert code == 1
    assert "has begun before" in said
    assert not (node.folder / "exit.json").exists()
    assert (node.folder / "count").read_text() == "started\n"


@pytest.mark.proof
@pytest.mark.parametrize(("end", "said"), [("killed", "has begun before"), ("done", "the attempt is over")])
def test_a_second_agent_says_why_it_starts_nothing_whatever_the_first_sweeps(node: Any, end: str, said: str) -> None:
    """It was killed with the leftovers of the first one, without a word."""
    plan = node.shell('cd "$(dirname $TRAINMASTER_STOP)"; echo up > up; while [ ! -e go ]; do sleep 0.02; done')
    first = node.start(plan)
    node.wait_for("up")
    guard = guard_of(first.pid)
    second = node.start(plan)
    second.send_signal(signal.SIGSTOP)  # until the first has swept
    if end == "killed":
        first.kill()
    (node.folder / "go").touch()
    first.wait()
    node.until(lambda: not node.alive(guard), what="the end of the guard")
    second.send_signal(signal.SIGCONT)
    assert said in second.communicate()[1]
    assert second.returncode == 1


@pytest.mark.proof
def test_many_agents_at_once_are_one(node: Any) -> None:
    plan = node.shell('echo started >> "$(dirname $TRAINMASTER_STOP)/count"; sleep 0.3')
    agents = [node.start(plan, "--detach") for _ in range(4)]
    codes = [agent.wait() for agent in agents]
    assert codes.count(0) >= 1
    node.over()
    assert (node.folder / "count").read_text() == "started\n"
    assert node.names().count("PROJECT start") == 1


def test_an_agent_that_has_the_lock_and_no_name_yet_is_waited_for(tmp_path: Path) -> None:
    """A second submit must find that the first one's agent has begun, and not that nothing started."""
    with (tmp_path / LOCK_FILE).open("w+b", buffering=0) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        named = threading.Timer(0.2, held.write, [b"pid 1\n"])
        named.start()
        with pytest.raises(Refused, match=r"another agent runs this attempt \(pid 1\)"):
            AttemptFolder(tmp_path).begin()
        named.join()
