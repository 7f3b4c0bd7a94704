"""Attempts that a node server finds on its machine, whatever names processes carry."""

from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from pathlib import Path

import pytest

from trainmaster.core.plan import ATTEMPT_VARIABLE, EVENTS_VARIABLE
from trainmaster.remote.node_server import Node

pytestmark = pytest.mark.spawns


def test_a_name_that_is_no_attempts_does_not_hide_the_others(tmp_path: Path) -> None:
    """A job that named a process so made its machine one that cannot be asked."""
    attempt = f"{uuid.uuid4()}.1"
    folder = tmp_path / "jobs" / attempt.removesuffix(".1") / "attempts" / "1-n1"
    started = [
        subprocess.Popen(
            ["sleep", "60"], env={**os.environ, ATTEMPT_VARIABLE: name, EVENTS_VARIABLE: str(folder / "events.jsonl")}
        )
        for name in (attempt, "../../etc", "job.1-of-nobody")
    ]
    try:
        answer, _ = asyncio.run(Node(tmp_path, "n1").owned())
        assert answer == {"owned": [(attempt, f"1 process: {started[0].pid}")]}
    finally:
        for process in started:
            process.kill()
            process.wait()
