"""The REST API: every group of routes/, in the order of the OpenAPI document."""

from __future__ import annotations

from trainmaster.web.routes import (
    artifacts,
    checkpoints,
    costs,
    events,
    goodput,
    health,
    iterations,
    jobs,
    logs,
    nodes,
    targets,
    tokens,
    webhooks,
    workdirs,
)

ROUTERS = tuple(
    part.router
    for part in (
        jobs,
        iterations,
        events,
        logs,
        artifacts,
        checkpoints,
        nodes,
        costs,
        goodput,
        webhooks,
        tokens,
        targets,
        workdirs,
        health,
    )
)
