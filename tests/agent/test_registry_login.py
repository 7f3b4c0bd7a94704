"""The password of a registry stays nowhere: not in what the engine's refusal repeats, not after a killed agent."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

PASSWORD = "hunter2-Zq9xW7vB3nM1"
LOGIN = {"user": "me", "password_from": "REGISTRY"}
CONTAINER = {"image": "registry.example.org/x:1", "engine": "docker", "login": LOGIN}
# Real engines write what the registry answers, and keep the login in a file until it is removed.
REPEATS = "read -r word; echo \"Error: unauthorized: me with '$word' is not known\"; exit 1"
SLOW = '[ "$1" = ps ] && exit 0; [ "$1" = login ] || exec sleep 60; read -r word; echo "$word" > "$DOCKER_CONFIG/auth"'


@pytest.fixture
def engine(node: Any, tmp_path: Path) -> Any:
    """A docker that does as the given script says."""

    def make(script: str) -> Path:
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin" / "docker"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        node.env["PATH"] = f"{program.parent}:{node.env['PATH']}"
        plan: Path = node.plan("true", container=CONTAINER)
        (node.folder / "secrets").mkdir()
        (node.folder / "secrets" / "REGISTRY").write_text(f"{PASSWORD}\n")
        return plan

    return make


def holders(folder: Path) -> list[str]:
    """Files of the attempt that hold the password."""
    found = []
    for path in (Path(place, name) for place, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(FileNotFoundError):  # the agent removes files, engine.log for one, while we look
            if path.is_file() and PASSWORD.encode() in path.read_bytes():
                found.append(str(path.relative_to(folder)))
    return found


def test_a_registry_that_repeats_the_password_puts_it_into_no_record(node: Any, engine: Any) -> None:
    assert node.run(engine(REPEATS))[0] != 0
    assert "me with '[password]' is not known" in node.record().message
    assert holders(node.folder) == []


def test_the_login_of_an_agent_that_is_killed_in_the_pull_is_removed(node: Any, engine: Any) -> None:
    agent = node.start(plan := engine(SLOW))
    node.until(lambda: "registry/auth" in holders(node.folder), what="the login")
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    assert node.run(plan, "--kill") == (0, "")
    assert holders(node.folder) == []
