"""The REST API: every group of routes/, in the order of the OpenAPI document."""

from __future__ import annotations

from trainmaster.web.routes import (
    artifacts,
    checkpoints,
    costs,
    curves,
    events,
    goodput,
    health,
    iterations,
    jobs,
    logs,
    nodes,
    queue,
    search,
    sets,
    targets,
    tokens,
    webhooks,
    workdirs,
)

ROUTERS = tuple(
    part.router
    for part in (
        jobs,
        sets,
        curves,
        iterations,
        events,
        logs,
        artifacts,
        checkpoints,
        nodes,
        queue,
        search,
        costs,
        goodput,
        webhooks,
        tokens,
        targets,
        workdirs,
        health,
    )
)
