"""The FastAPI application: routes, middlewares, error handlers, and the reconciler beside them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import importlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import FastAPI
from prometheus_client import Metric

from trainmaster import __version__, targets
from trainmaster.control import budget, maintain, reconcile
from trainmaster.control.log_view import search as log_search
from trainmaster.control.notify import outbox
from trainmaster.control.reconcile import STORAGE_FOLDER
from trainmaster.core.config import presets
from trainmaster.pages.parts import node_journal
from trainmaster.storage import Store, open_store
from trainmaster.store import jobs
from trainmaster.store.database import Database
from trainmaster.store.page_rows import backlog, figures
from trainmaster.web import api, errors, navigation, openapi, templating, views
from trainmaster.web.auth import AuthMiddleware
from trainmaster.web.beside import Beside
from trainmaster.web.curve_cache import CurveCache
from trainmaster.web.guard import GuardMiddleware
from trainmaster.web.kept import Kept
from trainmaster.web.ledgers import Ledgers, MachineSums
from trainmaster.web.metrics import UNMEASURED, Meter, MetricsMiddleware
from trainmaster.web.otlp.exporter import Exporter, TraceMiddleware
from trainmaster.web.otlp.settings import Otlp
from trainmaster.web.page_cache import PageCache
from trainmaster.web.rate_limit import ASKING, Rate, Turns
from trainmaster.web.sections import ROUTERS
from trainmaster.web.sections.compared import ComparedCurves
from trainmaster.web.sign_in import login, oidc
from trainmaster.web.sign_in.local_access import LocalAccess
from trainmaster.web.sign_in.oidc import SignIn
from trainmaster.web.storage_probe import StorageProbe
from trainmaster.web.streaming import Followers

_THREADS = 8
_M_ARENA_MAX = -8  # of malloc.h
_COLLECT_AFTER = 10_000  # objects made and not freed; Python's own is 700
_SHORT = 2 << 20  # bytes of events of a job that are read ahead
_SILENT_S = 60.0  # without a tick for this long the reconciler counts as failed
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
    local: LocalAccess | None = None,
    trust_jobs: bool = False,
    sign_in: SignIn | None = None,
    otlp: Otlp | None = None,
) -> FastAPI:
    """The application over one database.

    `hosts` are further valid Host names, for use behind a proxy. `storage` holds the files of jobs; by default a folder
    of the home. `require_token` requires a token over loopback too; `local` is the one of the server's own Unix user.
    `trust_jobs` lets tokens of one project submit to the target `local`, whose jobs may have the server's rights.
    `sign_in` is the OpenID provider whose accounts are let in too. `otlp` says where traces and metrics are sent.
    """
    kept = storage if storage is not None else open_store(home / STORAGE_FOLDER)
    meter = Meter()
    exporter = Exporter(otlp) if otlp is not None else None

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        _settle()
        async with _sums(app.state.ledgers, app.state.machines), _export(app, exporter):
            if not reconcile:
                yield
                return
            async with _reconciler(db, home, kept, meter) as state:
                app.state.reconciler = state
                yield

    # No interactive documents: FastAPI would load their scripts from a CDN.
    app = FastAPI(
        title="Trainmaster", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        openapi_url="/v1/openapi.json",
    )  # fmt: skip
    app.state.db, app.state.home, app.state.storage, app.state.meter = db, home, kept, meter
    beside = Beside()
    app.state.live, app.state.ledgers = PageCache(db, beside), Ledgers(db, beside)
    app.state.machines = MachineSums(db, home)
    app.state.curves, app.state.compared = CurveCache(db, beside), ComparedCurves(db)
    app.state.kept = Kept()
    app.state.followers = followers if followers is not None else Followers()
    app.state.searches = log_search.Slots()
    app.state.turns = Turns()
    app.state.reconciler = lambda: "off"
    app.state.storage_probe = StorageProbe(kept)
    app.state.local, app.state.trust_jobs = local, trust_jobs
    app.state.sign_in = sign_in
    pages = (views.router, *ROUTERS, login.router, *((oidc.router,) if sign_in is not None else ()))
    for router in (*pages, *api.ROUTERS, templating.router):
        # As they are: `include_router` builds all sixty again in each app, 0.3 s of its first request.
        app.router.routes.extend(router.routes)
    templating.navigate(navigation.shown(app.router.routes))
    app.openapi = openapi.document(app, loopback=not require_token)  # type: ignore[method-assign]
    errors.install(app)
    # The last one added runs first: guard, traces, metrics, authentication.
    issuer = sign_in.provider.settings.issuer if sign_in is not None else None
    app.add_middleware(AuthMiddleware, db=db, loopback=not require_token, local=local, issuer=issuer, asking=rate)
    app.add_middleware(MetricsMiddleware, meter=meter)
    if exporter is not None and exporter.traces:
        app.add_middleware(TraceMiddleware, exporter=exporter)
    app.add_middleware(GuardMiddleware, hosts=hosts)
    return app


def _settle() -> None:
    """Bound the threads and the memory of a server that runs for months."""
    # Database calls need few threads, and many compete for the interpreter lock: with 40 one slow call slowed every
    # answer. Storage has threads of its own (control/log_view/logs.py).
    anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
    # A thread that computes (the ledger of a long run) keeps the interpreter for this long whenever a request waits for
    # it, which is after each of its queries: 5 ms by default.
    sys.setswitchinterval(0.001)
    # A page of a thousand rows makes 7,000 objects, which is ten passes of the collector at 700, and after a hundred of
    # those one over everything that is kept: 8 of 100 pages of a queue of 10,000 jobs waited for one.
    gc.set_threshold(_COLLECT_AFTER)
    # glibc keeps an arena for each thread and rarely returns its memory: 80 MB for a dozen threads.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


# Imported by the first page of nodes, so that other programs start without them.
_LATER = (
    "trainmaster.cluster.health.history",
    "trainmaster.cluster.health.journal",
    "trainmaster.cluster.remedy.remedy",
)


# Asked for once by the server itself: statements, specs and modules of a first request take up to a second.
_ASKED = (*(entry.path for entry in navigation.ENTRIES), "/search?q=a", "/v1/cost", "/v1/cost/jobs", "/v1/budgets")


def warm_up(app: FastAPI | None = None) -> None:
    """What a server does beside its first requests so that the later ones do not wait for it."""
    templating.compile_all()
    for name in _LATER:
        importlib.import_module(name)
    presets.families()  # which the spec of a job that trains is checked against
    for name in targets.names():
        targets.is_free(name)  # which imports it
    if app is not None:
        try:
            asyncio.run(_ask_pages(app))
        except Exception:  # the database may be away: who comes first waits then
            log.info("the pages could not be read ahead", exc_info=True)
    # A full pass of the collector would look at all that was loaded, for 0.1 s in which nobody is answered. It stays.
    gc.collect()
    gc.freeze()


async def _ask_pages(app: FastAPI) -> dict[str, int]:
    """Ask for each page once, and for those of the newest job, as the user does whose server this is; what came back.

    In the state of these requests is that they are nobody's: they count in no metric and have no span.
    """
    db: Database = app.state.db
    listed = jobs.list_jobs(db, limit=1)
    short = [row.id for row in listed if figures.measure_events(db, row.id) <= _SHORT]
    for job_id in short:
        figures.sample_events(db, job_id, count=1)  # as for a long run, whose first page is drawn from a sample
    paths = [*_ASKED, *(f"/jobs/{job_id}{tab}" for job_id in short for tab in ("", "/events"))]
    headers = [(b"host", b"127.0.0.1")]
    if app.state.local is not None:
        headers.append((b"authorization", f"Bearer {app.state.local.token}".encode()))

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}  # no body is read

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses[path] = message["status"]

    statuses: dict[str, int] = {}
    for path in paths:
        name, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "GET",
            "scheme": "http", "path": name, "raw_path": name.encode(), "query_string": query.encode(), "root_path": "",
            "state": {UNMEASURED: True}, "headers": headers, "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        await app(scope, receive, send)
    return statuses


@contextlib.asynccontextmanager
async def _sums(ledgers: Ledgers, machines: MachineSums) -> AsyncIterator[None]:
    """Keep the sums of /metrics fresh beside the server."""
    stop = asyncio.Event()
    tasks = [asyncio.create_task(each.run(stop), name=type(each).__name__) for each in (ledgers, machines)]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)


def _export(app: FastAPI, exporter: Exporter | None) -> contextlib.AbstractAsyncContextManager[None]:
    """Send traces and metrics beside the server, where that is set."""
    if exporter is None:
        return contextlib.nullcontext()
    state = app.state

    def collect() -> list[Metric]:
        meter: Meter = state.meter
        pulse = backlog.read_backlog(state.db)
        sums, machines = state.ledgers.sums(), state.machines.read()
        meter.update(pulse, following=state.followers.open, sums=sums, machines=machines)
        return meter.collect()

    return exporter.running(collect)


class _Looks(asyncio.Event):
    """Set at each successful tick of the reconciler, and counts them."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def set(self) -> None:
        self._meter.tick()
        super().set()


@contextlib.asynccontextmanager
async def _reconciler(db: Database, home: Path, storage: Store, meter: Meter) -> AsyncIterator[Callable[[], str]]:
    """Run the reconciler beside the server; yields a function that returns its state."""
    stop, looks = asyncio.Event(), _Looks(meter)
    checks = functools.partial(node_journal.read_verdicts, home)
    driven = reconcile.run(db, home, stop=stop, storage=storage, leads=looks, checks=checks)
    task = asyncio.create_task(driven, name="reconciler")
    # Budgets and notifications have loops of their own: a hanging webhook must not delay a job, nor a job a budget.
    beside = [
        asyncio.create_task(budget.run(db, stop=stop, home=home), name="budgets"),
        asyncio.create_task(outbox.run(db, home, stop=stop), name="news"),
        asyncio.create_task(maintain.run(db, home, storage, stop=stop), name="maintenance"),
    ]
    for each in (task, *beside):
        each.add_done_callback(_log_death)

    def state() -> str:
        if task.done() or any(each.done() for each in beside) or (meter.tick_age_s or 0.0) > _SILENT_S:
            return "failed"
        return "running" if looks.is_set() else "starting"

    try:
        yield state
    finally:
        stop.set()
        await asyncio.gather(task, *beside, return_exceptions=True)


def _log_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s died; jobs are shown but make no progress", task.get_name(), exc_info=task.exception())
