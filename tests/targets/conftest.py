"""Targets find the package under test, and a way to run a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import trainmaster
from trainmaster.core.plan import rank_log
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import TargetState
from trainmaster.targets import Handle, Placement, Poll, Target


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(trainmaster.__file__).parents[1]))


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return asyncio.run


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Placement]:
    def place(script: str = "echo hello", *, number: int = 1, **spec: Any) -> Placement:
        mapping = {"name": "a", "preflight": {"level": 0}, "command": ["sh", "-c", script], **spec}
        folder = tmp_path / "a-job"
        # No two tests may find each other's processes.
        return Placement(attempt=f"{tmp_path.name}.{number}", spec=parse_spec(mapping), job_folder=folder)

    return place


@pytest.fixture
def end() -> Callable[..., Coroutine[Any, Any, Poll]]:
    async def end(target: Target, handle: Handle, *, limit_s: float = 60.0) -> Poll:
        """Poll until the attempt is over; the limit only ends a test that has failed."""
        async with asyncio.timeout(limit_s):
            while not (poll := await target.poll(handle)).state.over:
                assert poll.state in (TargetState.WAITING, TargetState.RUNNING), poll
                await asyncio.sleep(0.02)
        return poll

    return end


@pytest.fixture
def printed() -> Callable[..., Coroutine[Any, Any, bytes]]:
    async def printed(target: Target, handle: Handle, *, limit_s: float = 60.0) -> bytes:
        """What rank 0 says first: the sign that it is up."""
        async with asyncio.timeout(limit_s):
            while True:
                if text := await target.read(handle, rank_log(0), offset=0, limit=100):
                    return text
                await asyncio.sleep(0.02)

    return printed
