"""The application: routes, guard, error answers, and the reconciler that lives as long as it does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from fastapi import FastAPI

from trainmaster import __version__, control
from trainmaster.store import Database
from trainmaster.web import api, errors, frame, views
from trainmaster.web.guard import Guard
from trainmaster.web.live import LivePages

log = logging.getLogger(__name__)


def create_app(db: Database, home: Path, *, reconcile: bool, hosts: Sequence[str] = ()) -> FastAPI:
    """The web over one database. `hosts` are names a proxy may call it by, beside those of loopback."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if not reconcile:
            yield
            return
        async with _reconciler(db, home) as state:
            app.state.reconciler = state
            yield

    # Our own error pages and no pages from a CDN: the interactive documents of FastAPI would load scripts from one.
    app = FastAPI(
        title="Trainmaster", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        openapi_url="/v1/openapi.json",
    )  # fmt: skip
    app.state.db = db
    app.state.live = LivePages(db)
    app.state.reconciler = lambda: "off"
    for part in (views, api, frame):
        app.include_router(part.router)
    errors.install(app)
    app.add_middleware(Guard, hosts=hosts)
    return app


@contextlib.asynccontextmanager
async def _reconciler(db: Database, home: Path) -> AsyncIterator[Callable[[], str]]:
    """Runs the reconciler beside the server; yields a function that says how it stands."""
    stop, leads = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(control.run(db, home, stop=stop, leads=leads), name="reconciler")
    task.add_done_callback(_tell_of_death)

    def state() -> str:
        if task.done():
            return "failed"
        return "running" if leads.is_set() else "standby"

    try:
        yield state
    finally:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)


def _tell_of_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the reconciler died; jobs are shown but not driven", exc_info=task.exception())
