"""Machines: checked nodes and rented instances."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.responses import Response

from trainmaster.api.nodes import Instances, Nodes
from trainmaster.store import nodes
from trainmaster.web import dependencies
from trainmaster.web.routes import TRAINING, group, reply

router = group("machines")
State = Annotated[
    Literal["intended", "launching", "active", "terminating", "gone", "lost"] | None,
    Query(description="instances in this state"),
]


@router.get("/v1/nodes", response_model=Nodes)
def list_nodes(
    db: dependencies.Db, project: dependencies.Project, limit: dependencies.Limit = 50, offset: dependencies.Offset = 0
) -> Response:
    """Every checked node, with the verdict of its newest checks."""
    rows = nodes.list_nodes(db, project=project, limit=limit, offset=offset)
    return reply(Nodes(nodes=tuple(rows), limit=limit, offset=offset))


@router.get("/v1/instances", response_model=Instances)
def list_instances(
    db: dependencies.Db,
    project: dependencies.Project,
    state: State = None,
    limit: dependencies.Limit = 50,
    offset: dependencies.Offset = 0,
) -> Response:
    """Rented instances, past and present, newest first."""
    rows = nodes.list_instances(db, project=project, state=state, limit=limit, offset=offset)
    return reply(Instances(instances=tuple(rows), limit=limit, offset=offset))


@router.get(f"{TRAINING}/jobs/{{uuid}}/instances", response_model=Instances)
def list_job_instances(
    job: dependencies.Job, db: dependencies.Db, limit: dependencies.Limit = 50, offset: dependencies.Offset = 0
) -> Response:
    """Instances rented for a job."""
    rows = nodes.list_instances(db, job_id=job.id, limit=limit, offset=offset)
    return reply(Instances(instances=tuple(rows), limit=limit, offset=offset))
