"""Machines: what was rented, and what the checks last said of each node."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.responses import Response

from trainmaster.store import fleet
from trainmaster.web import answers, ask
from trainmaster.web.routes import TRAINING, group, reply

router = group("machines")
State = Annotated[
    Literal["intended", "launching", "active", "terminating", "gone", "lost"] | None, Query(description="only these")
]


@router.get("/v1/nodes", response_model=answers.Nodes)
def list_nodes(db: ask.Db, project: ask.Project, limit: ask.Limit = 50, offset: ask.Offset = 0) -> Response:
    """Every node that was ever checked, with the verdict of its newest checks."""
    rows = fleet.list_nodes(db, project=project, limit=limit, offset=offset)
    return reply(answers.Nodes(nodes=tuple(rows), limit=limit, offset=offset))


@router.get("/v1/instances", response_model=answers.Instances)
def list_instances(
    db: ask.Db, project: ask.Project, state: State = None, limit: ask.Limit = 50, offset: ask.Offset = 0
) -> Response:
    """Machines that were, are or may be rented, newest first."""
    rows = fleet.list_instances(db, project=project, state=state, limit=limit, offset=offset)
    return reply(answers.Instances(instances=tuple(rows), limit=limit, offset=offset))


@router.get(f"{TRAINING}/jobs/{{uuid}}/instances", response_model=answers.Instances)
def list_job_instances(job: ask.Job, db: ask.Db, limit: ask.Limit = 50, offset: ask.Offset = 0) -> Response:
    """Machines that were rented for a job."""
    rows = fleet.list_instances(db, job_id=job.id, limit=limit, offset=offset)
    return reply(answers.Instances(instances=tuple(rows), limit=limit, offset=offset))
