"""The queue, the machines that it gives out, and what each project may have of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from trainmaster.api.queue import MachinesPage, ProjectShare, QueuePage
from trainmaster.control.queueing import machines as drains
from trainmaster.core.roles import Role
from trainmaster.pages import machines, queue
from trainmaster.pages.parts.node_journal import read_targets
from trainmaster.store import audit
from trainmaster.store.capacity import devices
from trainmaster.web import dependencies
from trainmaster.web.auth import need
from trainmaster.web.errors import Refused
from trainmaster.web.routes import Body, group, reply

router = group("queue")
_FRESH_S = 2.0  # as often as a queue asks for its devices
_TARGET = "^[^\\x00]+$"
MachineName = Annotated[str, Path(min_length=1, max_length=255, description="name of the machine")]
Through = Annotated[
    str | None,
    Query(max_length=4096, pattern=_TARGET, description="its target, where several have a machine of this name"),
]


class ShareBody(Body):
    """Weight and quota of a project."""

    weight: float = Field(default=1.0, gt=0, le=1000, strict=True)
    quota: int | None = Field(default=None, ge=0, le=1_000_000, strict=True, description="devices at once")


class DrainBody(Body):
    """Why a machine is drained."""

    reason: str = Field(min_length=1, max_length=drains.MOST)
    target: str | None = Field(
        default=None, max_length=4096, pattern=_TARGET, description="its target, where several have one of this name"
    )


@router.get("/v1/queue", response_model=QueuePage)
def list_queue(
    db: dependencies.Db, project: dependencies.Project, kept: dependencies.Answers, limit: dependencies.Limit = 50,
    offset: dependencies.Offset = 0,
) -> Response:  # fmt: skip
    """Jobs that wait, in the order of the queue: position, reason, what is before each, expected start.

    Of one project, beside them how many jobs of others wait.
    """
    page, others = queue.read(db, project=project, limit=limit, offset=offset), 0
    if project is not None:
        read = partial(queue.count_others, db, project=project)
        others = kept.read(("others in the queue", project), read, for_s=_FRESH_S)
    return reply(replace(page, others=others))


@router.get("/v1/machines", response_model=MachinesPage)
def list_machines(
    request: Request, db: dependencies.Db, project: dependencies.Project, who: dependencies.Viewer
) -> Response:
    """Machines of every target that was used: devices, who has each and since when, last verdict."""
    home = request.app.state.home if who.project is None else None  # the operator's checks are of the whole server
    return reply(machines.read(db, home=home, project=project))


@router.put("/v1/machines/{machine}/drain", status_code=204, response_class=Response)
def drain_machine(
    request: Request, machine: MachineName, body: DrainBody, db: dependencies.Db, who: dependencies.Operator
) -> Response:
    """Drain a machine of our own queue: nothing new starts there, jobs that run go on."""
    checked_on = read_targets(request.app.state.home).get(machine)
    with dependencies.finding():
        drains.drain(db, machine, reason=body.reason, on=body.target, by=who.name, checked_on=checked_on)
    return Response(status_code=204)


@router.delete("/v1/machines/{machine}/drain", status_code=204, response_class=Response)
def readmit_machine(
    machine: MachineName, db: dependencies.Db, who: dependencies.Operator, target: Through = None
) -> Response:
    """Let a drained machine take jobs again. 404 where it is not drained."""
    with dependencies.finding():
        drains.readmit(db, machine, on=target, by=who.name)
    return Response(status_code=204)


@router.put("/v1/shares/{project}", response_model=ProjectShare)
def set_share(
    project: dependencies.ProjectName, body: ShareBody, db: dependencies.Db, who: dependencies.Admin
) -> Response:
    """Set the weight and the quota of a project in our own queue."""
    need(who, Role.ADMIN)
    if not who.runs_server:
        raise Refused(403, "forbidden", f"token {who.name} is of one project; shares are set by an admin of the server")
    with db.write() as conn:
        devices.set_share(conn, project, weight=body.weight, quota=body.quota)
        detail = {"weight": body.weight, "quota": body.quota}
        audit.record(conn, who=who.name, action="share.set", subject=f"share:{project}", detail=detail)
    return reply(ProjectShare(project=project, weight=body.weight, quota=body.quota))
