"""Queue: every job that waits, its place and why; below, who has which device."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from trainmaster.core.roles import Role
from trainmaster.pages import machines, queue
from trainmaster.pages.parts import target_names
from trainmaster.web import dependencies
from trainmaster.web.sections.form import link
from trainmaster.web.templating import render

router = APIRouter(include_in_schema=False)
FRESH_S = 2.0  # as often as a queue asks for its devices
MOST = 100
_MOST_MACHINES = 200


@router.get("/queue")
def show_queue(
    *, request: Request, db: dependencies.Db, who: dependencies.Viewer, kept: dependencies.Answers,
    offset: dependencies.Offset = 0, part: bool = False,
) -> Response:  # fmt: skip
    """Jobs of the caller's project that wait, or of all; devices of others are shown as taken."""
    seen, home = who.project, request.app.state.home if who.project is None else None
    page = kept.read(
        ("queue", seen, offset), lambda: queue.read(db, project=seen, limit=MOST, offset=offset), for_s=FRESH_S
    )
    others = 0
    if seen is not None:
        others = kept.read(("others in the queue", seen), lambda: queue.count_others(db, project=seen), for_s=FRESH_S)
    before = queue.describe_before(page)
    held = kept.read(("machines", seen), lambda: machines.read(db, home=home, project=seen), for_s=FRESH_S)
    given = [(machine, *machines.fold(machine)) for machine in held.machines if machine.devices or machine.closed]
    template = "queue_part.html" if part else "queue.html"
    return render(
        template, page=page, before=before, others=others, machines=given, most_machines=_MOST_MACHINES, who=who,
        may_act=who.may(Role.USER), link=link, names=target_names.read(db), shorten=target_names.shorten,
    )  # fmt: skip
