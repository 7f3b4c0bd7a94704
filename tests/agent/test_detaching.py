"""--detach: 0 means that the agent has begun; anything else says why not; and it needs nobody afterwards."""

from __future__ import annotations

import os
import signal
from typing import Any


def test_the_agent_goes_on_in_a_session_of_its_own(node: Any) -> None:
    here = 'cd "$(dirname $TRAINMASTER_STOP)"; '
    plan = node.shell(here + "echo $PPID > agent; while [ ! -e go ]; do sleep 0.02; done; echo done")
    launcher = node.start(plan, "--detach")
    _, said = launcher.communicate()
    assert (launcher.returncode, said) == (0, "")
    agent = int(node.wait_for("agent"))
    assert agent != launcher.pid
    assert os.getsid(agent) == agent
    (node.folder / "go").touch()
    assert node.over().ok


def test_it_has_begun_when_the_launcher_returns(node: Any) -> None:
    assert node.run(node.shell("sleep 0.2"), "--detach")[0] == 0
    assert (node.folder / "agent.lock").read_text().startswith("pid ")


def test_a_folder_that_cannot_be_is_said(node: Any) -> None:
    plan = node.shell("true")
    elsewhere = node.folder.parents[1] / "plan.json"
    elsewhere.write_text(plan.read_text())
    plan.unlink()
    node.folder.rmdir()
    node.folder.write_text("a file where the folder must be")
    code, said = node.run(elsewhere, "--detach")
    assert code == 1
    assert str(node.folder) in said


def test_an_agent_that_cannot_begin_says_why(node: Any) -> None:
    plan = node.shell("true")
    (node.folder / "agent.lock").mkdir()
    code, said = node.run(plan, "--detach")
    assert code == 1
    assert "agent.lock" in said


def test_a_launcher_killed_at_once_leaves_one_agent_or_none(node: Any) -> None:
    plan = node.shell("true")
    launcher = node.start(plan, "--detach")
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    node.run(plan, "--detach")
    assert node.over().ok
    assert node.names().count("PROJECT start") == 1
