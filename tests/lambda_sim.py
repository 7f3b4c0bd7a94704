"""Lambda Cloud for tests: the simulator with real SSH instances, the target's environment, and a control plane."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.sim.lambda_cloud.settings import Settings
from trainmaster.sim.lambda_cloud.simulator import Simulator
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow

PACE = 60.0  # simulated seconds in one real second


@contextlib.contextmanager
def lambda_cloud(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Simulator]:
    """A simulator, and an environment that points the target `lambda` at it."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "ssh-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    given = {
        "cache": _cache(),
        "folder": folder / "sim",
        "time_factor": PACE,
        "boot_s": 20.0,
        "terminate_s": 5.0,
        **settings,
    }
    with Simulator(Settings(**given)) as simulator:
        for name, value in {**simulator.environment(), "LAMBDA_SSH_KEY_FILE": str(key)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
        monkeypatch.setenv("LAMBDA_LOST_AFTER_S", "20")
        yield simulator
        summary = simulator.summary()
        assert summary["foreign_touched"] == [] and summary["schema_faults"] == []


@functools.cache
def _cache() -> Path:
    """One cache for the instances of all tests: the node half is received and compiled once instead of for each."""
    folder = tempfile.mkdtemp(prefix="lambda-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def submit(db: Database, script: str, **spec: Any) -> JobRow:
    document = {"name": "a", "target": "lambda", "command": ["sh", "-c", script], "preflight": {"level": 0}}
    return submitting.submit(db, parse_spec({**document, **spec}))


def drive(
    db: Database,
    home: Path,
    *jobs: JobRow,
    also: Callable[[], None] = lambda: None,
    until: Callable[[], bool] | None = None,
) -> list[JobRow]:
    """Reconcile until every job is final, or `until` holds; `also` is called meanwhile."""

    async def go() -> list[JobRow]:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=0.1))
        try:
            while True:
                now = [found for job in jobs if (found := find_job(db, job.id)) is not None]
                if until() if until is not None else all(job.status.final for job in now):
                    return now
                also()
                await asyncio.sleep(0.05)
        finally:
            stop.set()
            await loop

    return asyncio.run(go())


def live(simulator: Simulator) -> list[dict[str, Any]]:
    """Instances that are billed now, without those of others."""
    ended = ("terminated", "preempted")
    return [one for one in simulator.instances() if not one["foreign"] and one["status"] not in ended]


def ask(answer: Awaitable[Any]) -> Any:
    """The result of a coroutine, with connections closed."""
    from trainmaster import targets

    async def go() -> Any:
        try:
            return await answer
        finally:
            await targets.close()

    return asyncio.run(go())
