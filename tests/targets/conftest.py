"""Targets find the package under test, and a way to run a coroutine."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainmaster
from sshd import Lab, lab, needs_sshd
from trainmaster import targets
from trainmaster.core.plan import rank_log
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import TargetState
from trainmaster.targets import Handle, Placement, Places, Poll, Submission, Target


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(trainmaster.__file__).parents[1]))


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    async def and_close(work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await work
        finally:
            await targets.close()

    return lambda work: asyncio.run(and_close(work))


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three machines behind OpenSSH servers, each with a home folder of its own."""
    with lab(tmp_path_factory.mktemp("ssh")) as made:
        for name in ("n1", "n2", "n3"):
            made.start(name)
        made.wait()
        yield made


@pytest.fixture
def hosts_file(machines: Lab, tmp_path: Path) -> Path:
    """A hosts file of the three. Attempts of other tests that have ended hold no slot."""
    hosts = [{"host": "127.0.0.1", "name": one.name, "port": one.port, "slots": 4} for one in machines.hosts]
    document = {
        "known_hosts": str(machines.known_hosts),
        "defaults": {"key": str(machines.key), "python": sys.executable},
        "hosts": hosts,
    }
    path = tmp_path / "hosts.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(params=["local", pytest.param("ssh", marks=needs_sshd)])
def name(request: pytest.FixtureRequest) -> str:
    """Each target that can run here, as a spec names it."""
    return f"ssh:{request.getfixturevalue('hosts_file')}" if request.param == "ssh" else str(request.param)


@pytest.fixture
def reserve() -> Callable[..., Coroutine[Any, Any, Submission]]:
    """What the control plane does before it submits."""

    async def reserve(target: Target, submission: Submission) -> Submission:
        if not isinstance(target, Places):
            return submission
        return replace(submission, handle=await target.place(submission))

    return reserve


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Placement]:
    def place(script: str = "echo hello", *, number: int = 1, **spec: Any) -> Placement:
        mapping = {"name": "a", "preflight": {"level": 0}, "command": ["sh", "-c", script], **spec}
        folder = tmp_path / "a-job"
        # No two tests may find each other's processes.
        return Placement(
            attempt=f"{uuid.uuid5(uuid.NAMESPACE_URL, str(tmp_path))}.{number}",
            spec=parse_spec(mapping),
            job_folder=folder,
        )

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
