"""The application: routes, guard, error answers, and the reconciler that lives as long as it does."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import anyio.to_thread
from fastapi import FastAPI

from trainmaster import __version__, control
from trainmaster.control import budget
from trainmaster.control.notify import outbox
from trainmaster.control.reconcile import STORAGE_FOLDER
from trainmaster.storage import Store, open_store
from trainmaster.store import Database
from trainmaster.web import api, errors, login, openapi, templating, views
from trainmaster.web.auth import Door
from trainmaster.web.guard import Guard
from trainmaster.web.metrics import Measured, Meter
from trainmaster.web.page_cache import LivePages
from trainmaster.web.rate_limit import ASKING, Rate
from trainmaster.web.streaming import Followers

_THREADS = 8
_M_ARENA_MAX = -8  # of malloc.h
_SILENT_S = 60.0  # a reconciler that has not looked at the jobs for so long is not alive
log = logging.getLogger(__name__)


def create_app(
    db: Database,
    home: Path,
    *,
    reconcile: bool,
    hosts: Sequence[str] = (),
    storage: Store | None = None,
    require_token: bool = False,
    rate: Rate | None = ASKING,
    followers: Followers | None = None,
) -> FastAPI:
    """The web over one database.

    `hosts` are names a proxy may call it by, beside those of loopback. `storage` is where jobs' files are kept, a
    folder of the home where none is given. `require_token` asks for one over loopback too.
    """
    kept = storage if storage is not None else open_store(home / STORAGE_FOLDER)
    meter = Meter()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        _settle()
        if not reconcile:
            yield
            return
        async with _reconciler(db, home, kept, meter) as state:
            app.state.reconciler = state
            yield

    # Our own error pages and no pages from a CDN: the interactive documents of FastAPI would load scripts from one.
    app = FastAPI(
        title="Trainmaster", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        openapi_url="/v1/openapi.json",
    )  # fmt: skip
    app.state.db, app.state.home, app.state.storage, app.state.meter = db, home, kept, meter
    app.state.live = LivePages(db)
    app.state.followers = followers if followers is not None else Followers()
    app.state.reconciler = lambda: "off"
    for router in (views.router, login.router, *api.ROUTERS, templating.router):
        app.include_router(router)
    app.openapi = openapi.document(app, loopback=not require_token)  # type: ignore[method-assign]
    errors.install(app)
    # The last one added is the first one passed: guard, then the clock, then the door.
    app.add_middleware(Door, db=db, loopback=not require_token, asking=rate)
    app.add_middleware(Measured, meter=meter)
    app.add_middleware(Guard, hosts=hosts)
    return app


def _settle() -> None:
    """Make this process one that can serve for months beside a reconciler."""
    # What waits for the database needs few threads, and more than a few take the interpreter from each other: with 40
    # of them one slow moment made every answer slow. Storage has its own (control/logs.py).
    anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
    # glibc gives each thread a pool of memory of its own and hardly ever gives one back: 80 MB more for a dozen.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


class _Looks(asyncio.Event):
    """Is set at each look at the jobs that went well, and counts them."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def set(self) -> None:
        self._meter.tick()
        super().set()


@contextlib.asynccontextmanager
async def _reconciler(db: Database, home: Path, storage: Store, meter: Meter) -> AsyncIterator[Callable[[], str]]:
    """Runs the reconciler beside the server; yields a function that says how it stands."""
    stop, looks = asyncio.Event(), _Looks(meter)
    task = asyncio.create_task(control.run(db, home, stop=stop, storage=storage, leads=looks), name="reconciler")
    # Caps and news have loops of their own: a webhook that hangs must not keep a job waiting, nor a job a cap.
    beside = [
        asyncio.create_task(budget.run(db, stop=stop), name="budgets"),
        asyncio.create_task(outbox.run(db, home, stop=stop), name="news"),
    ]
    for each in (task, *beside):
        each.add_done_callback(_tell_of_death)

    def state() -> str:
        if task.done() or any(each.done() for each in beside) or (meter.tick_age_s or 0.0) > _SILENT_S:
            return "failed"
        return "running" if looks.is_set() else "starting"

    try:
        yield state
    finally:
        stop.set()
        await asyncio.gather(task, *beside, return_exceptions=True)


def _tell_of_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s died; jobs are shown but not driven", task.get_name(), exc_info=task.exception())
