"""The loop that moves every job on until it is final. It keeps nothing that matters in memory.

Level-triggered: at every tick it looks at each job that is not final, as its rows and its target show it, and takes
the next step. Whether it was told of a change, missed it, or was dead meanwhile makes no difference. Each job has a
task of its own, so that a target that hangs or raises holds up its own job and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainmaster import targets
from trainmaster.control.steps import TIMEOUTS_S, Plane, step
from trainmaster.core.errors import TrainmasterError
from trainmaster.store import Database, reads, writes
from trainmaster.targets import Target

LOCK_FILE = "reconciler.lock"
_AT_ONCE = 64  # jobs that are worked on at the same time
_LONGEST_REST_S = 30.0  # between two tries of a job whose target keeps failing
_PARTING_S = 2.0  # for steps that are under way when we are told to stop; a submit takes about one
_MESSAGE_LIMIT = 2_000  # characters of a failure shown to the user; the log has all of it

log = logging.getLogger(__name__)


async def run(
    db: Database,
    home: Path,
    *,
    stop: asyncio.Event,
    tick_s: float = 0.5,
    load: Callable[[str], Target] = targets.load,
    timeouts_s: Mapping[str, float] = TIMEOUTS_S,
    leads: asyncio.Event | None = None,
) -> None:
    """Reconcile until `stop` is set. Only one does it per home; others stand by and take over when it dies.

    `leads` is set once this one does, for those who show it.
    """
    home = home.absolute()  # noqa: ASYNC240 (rows keep this folder: it must not depend on where we stand)
    plane = Plane(db=db, home=home, load=load, timeouts_s=timeouts_s)
    async with _lead(home / LOCK_FILE, stop=stop, tick_s=tick_s) as leading:
        if leading:
            if leads is not None:
                leads.set()
            await _loop(plane, stop=stop, tick_s=tick_s)


@dataclass(slots=True)
class _Rest:
    """How long to leave a job alone whose last steps raised."""

    failures: int = 0
    until: float = 0.0  # of time.monotonic

    def lengthen(self, tick_s: float) -> None:
        self.until = time.monotonic() + min(tick_s * 2**self.failures, _LONGEST_REST_S)
        self.failures = min(self.failures + 1, 30)


async def _loop(plane: Plane, *, stop: asyncio.Event, tick_s: float) -> None:
    working: dict[str, asyncio.Task[None]] = {}
    resting: dict[str, _Rest] = {}
    slots = asyncio.Semaphore(_AT_ONCE)
    try:
        while not stop.is_set():
            working = {job_id: task for job_id, task in working.items() if not task.done()}
            open_jobs = await _list_open(plane.db)
            resting = {job_id: rest for job_id, rest in resting.items() if job_id in open_jobs}
            for job_id in open_jobs:
                rest = resting.setdefault(job_id, _Rest())
                if job_id not in working and time.monotonic() >= rest.until:
                    task = asyncio.create_task(_work(plane, job_id, rest, slots, tick_s), name=f"job {job_id}")
                    working[job_id] = task
            await _wait(stop, tick_s)
    finally:
        # A moment to finish what is nearly done; then cut off where they are, to be taken up again from the rows.
        if working:
            await asyncio.wait(working.values(), timeout=_PARTING_S)
        for task in working.values():
            task.cancel()
        await asyncio.gather(*working.values(), return_exceptions=True)


async def _work(plane: Plane, job_id: str, rest: _Rest, slots: asyncio.Semaphore, tick_s: float) -> None:
    """Steps of one job until it has nothing more to do now. Never raises."""
    async with slots:
        try:
            while True:
                job = await asyncio.to_thread(reads.find_job, plane.db, job_id)
                if job is None or job.stage is None or not await step(plane, job):
                    break
                log.info("job %s left %s", job_id, job.stage)
            rest.failures = 0
        except Exception as wrong:
            rest.lengthen(tick_s)
            # A target that cannot be asked is daily life; anything else may be our own mistake and shows its trace.
            log.warning("job %s: %s", job_id, wrong, exc_info=not isinstance(wrong, TrainmasterError))
            await _tell(plane, job_id, wrong)


async def _tell(plane: Plane, job_id: str, wrong: Exception) -> None:
    text = str(wrong) if isinstance(wrong, TrainmasterError) else f"{type(wrong).__name__}: {wrong}"
    try:
        await plane.apply(
            lambda conn: writes.set_message(conn, job_id, text[:_MESSAGE_LIMIT].replace("\x00", "\ufffd"))
        )
    except Exception:
        log.exception("job %s: its message could not be kept", job_id)


async def _list_open(db: Database) -> dict[str, None]:
    try:
        return dict.fromkeys(await asyncio.to_thread(reads.list_open, db))
    except Exception:  # a full disk or a database that restarts must not end the loop
        log.exception("the open jobs could not be read; trying again at the next tick")
        return {}


@contextlib.asynccontextmanager
async def _lead(path: Path, *, stop: asyncio.Event, tick_s: float) -> AsyncIterator[bool]:
    """Wait to be the only one. The kernel drops the lock with its holder, so that a killed one blocks nobody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Close-on-exec, which is Python's default: an agent that inherited it would hold the lock for as long as it runs.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        standing_by = False
        while not stop.is_set():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not standing_by:
                    log.info("another reconciler holds %s; standing by", path)
                standing_by = True
                await _wait(stop, tick_s)
                continue
            log.info("reconciling %s", path.parent)
            yield True
            return
        yield False
    finally:
        os.close(fd)


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
