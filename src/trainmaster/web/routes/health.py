"""Health of the server: liveness, readiness, Prometheus metrics."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from trainmaster import __version__
from trainmaster.api.health import Health, Hello, Ready
from trainmaster.store.page_rows import backlog
from trainmaster.web import dependencies
from trainmaster.web.metrics import Meter
from trainmaster.web.routes import group, reply

router = group("health")


@router.get("/api/hello", response_model=Hello)
def hello() -> Response:
    return reply(Hello(message="Hello World", version=__version__))


@router.get(
    "/healthz",
    response_model=Health,
    responses={503: {"model": Health, "description": "The reconciler has failed: jobs are shown but make no progress"}},
)
@router.head("/healthz", include_in_schema=False)
async def health(request: Request) -> Response:
    """Liveness of the server and state of its reconciler."""
    # Async: needs no thread. Those may all wait for a locked database, and a restart would not help.
    reconciler = request.app.state.reconciler()
    fine = reconciler != "failed"
    body = Health(status="ok" if fine else "failing", version=__version__, reconciler=reconciler)
    return reply(body, status_code=200 if fine else 503)


@router.get(
    "/readyz", response_model=Ready, responses={503: {"model": Ready, "description": "Not ready, with the reasons"}}
)
@router.head("/readyz", include_in_schema=False)
def ready(request: Request, db: dependencies.Db) -> Response:
    """Readiness: the database answers with the right schema, the storage takes files, the reconciler ticks."""
    answers = (backlog.find_fault(db), request.app.state.storage_probe.find_fault(), _reconciler_fault(request))
    faults = [fault for fault in answers if fault is not None]
    return reply(Ready(ready=not faults, faults=tuple(faults)), status_code=503 if faults else 200)


@router.get(
    "/metrics",
    dependencies=[dependencies.everywhere],
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text"}},
)
def metrics(request: Request, db: dependencies.Db) -> Response:
    """Prometheus metrics: jobs by status, event lag, reconciler ticks, request times, queue depths, nodes by
    verdict, devices used and free, waiting jobs, GPU-time by bin."""
    meter: Meter = request.app.state.meter
    state = request.app.state
    sums, machines = state.ledgers.sums(), state.machines.read()
    text = meter.render(backlog.read_backlog(db), following=state.followers.open, sums=sums, machines=machines)
    return Response(text, media_type=meter.media_type)


def _reconciler_fault(request: Request) -> str | None:
    state = request.app.state.reconciler()
    return None if state in ("running", "off") else f"the reconciler is {state}"
