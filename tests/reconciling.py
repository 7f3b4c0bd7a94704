"""A control plane inside a test: it runs while a block does, or until a job is final."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from trainmaster.control import reconcile
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow

_TICK_S = 0.1  # a look at every job and target costs milliseconds of a processor, of which the job has need too


@contextlib.asynccontextmanager
async def running(db: Database, home: Path) -> AsyncIterator[None]:
    stop = asyncio.Event()
    loop = asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=_TICK_S))
    try:
        yield
    finally:
        stop.set()
        await loop


def drive(db: Database, home: Path, job: JobRow, also: Callable[[JobRow], None] = lambda _: None) -> JobRow:
    """Reconcile until the job is final; `also` is called meanwhile."""

    async def go() -> JobRow:
        async with running(db, home):
            while True:
                now = find_job(db, job.id)
                assert now is not None
                if now.status.final:
                    return now
                also(now)
                await asyncio.sleep(_TICK_S)

    return asyncio.run(go())
