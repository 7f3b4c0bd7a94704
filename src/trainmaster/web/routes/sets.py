"""Sets of runs: submit one, list them, the table of results, cancel, pause and resume a schedule."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request
from pydantic import AfterValidator, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from trainmaster.api.sets import SetPage, SetsPage
from trainmaster.control.queueing import schedules
from trainmaster.control.queueing import sets as control
from trainmaster.core.config.sweep import Sweep, parse_sweep
from trainmaster.core.errors import Fault, JobFinal, SpecError
from trainmaster.core.ids import is_uuid
from trainmaster.core.roles import Role
from trainmaster.core.spec import DEFAULT_PROJECT
from trainmaster.pages import sets
from trainmaster.web import dependencies, json_body
from trainmaster.web.auth import Caller, need
from trainmaster.web.errors import Refused, not_found
from trainmaster.web.openapi import SET_BODY
from trainmaster.web.routes import group, reply

router = group("sets", prefix="/v1/sets")


async def _find(
    set_id: Annotated[str, Path(description="id of the set", json_schema_extra={"format": "uuid"})],
    who: dependencies.Viewer,
    db: dependencies.Db,
) -> SetPage:
    page = await run_in_threadpool(sets.read_one, db, set_id) if is_uuid(set_id) else None
    if page is None or page.set.id != set_id or not who.sees(page.set.project):  # of another project: as if none
        raise not_found(set_id[:64])
    return page


Found = Annotated[SetPage, Depends(_find)]
Find = Annotated[
    Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]{1,63}$"), AfterValidator(dependencies.refuse_secret)]
    | None,
    Query(description="name of a set, or beginning of its id"),
]


@router.get("", response_model=SetsPage)
def list_sets(
    db: dependencies.Db, project: dependencies.Project, find: Find = None,
    limit: dependencies.Limit = 50, offset: dependencies.Offset = 0,
) -> Response:  # fmt: skip
    """Sets of runs, newest first; `find` is a name, or the beginning of an id."""
    return reply(sets.read(db, project=project, find=find, limit=limit, offset=offset))


@router.post(
    "",
    response_model=SetPage,
    status_code=201,
    openapi_extra=SET_BODY,
    responses={200: {"model": SetPage, "description": "Submitted before with this key"}},
)
async def submit_set(
    request: Request, db: dependencies.Db, who: dependencies.User, idempotency_key: dependencies.Key = None
) -> Response:
    """Submit a spec with `matrix`, `search` or `schedule`, as JSON. Its trials become jobs as their turn comes.

    With `Idempotency-Key` a retry is safe: the same document returns the same set (200), another one 409.
    """
    document = await json_body.read_spec(request)
    with dependencies.creating():
        made, new = await request.app.state.turns.run(_submit, request, db, who, document, idempotency_key)
    return reply(made, status_code=201 if new else 200, headers={"Location": f"/v1/sets/{made.set.id}"})


@router.get("/{set_id}", response_model=SetPage)
def find_set(page: Found) -> Response:
    """A set with its table of results: a row for each trial, the best marked."""
    return reply(page)


@router.post("/{set_id}/pause", response_model=SetPage)
def pause_set(page: Found, db: dependencies.Db, who: dependencies.User) -> Response:
    """No time of its schedule comes until it is resumed; runs that have begun are not stopped."""
    return reply(pause(db, page, who))


@router.post("/{set_id}/resume", response_model=SetPage)
def resume_set(page: Found, db: dependencies.Db, who: dependencies.User) -> Response:
    """The schedule goes on with its next time from now; times during the pause are not made up for."""
    return reply(resume(db, page, who))


@router.post("/{set_id}/cancel", response_model=SetPage)
def cancel_set(page: Found, db: dependencies.Db, who: dependencies.User) -> Response:
    """No further trial begins, and those that are open are asked to save and stop."""
    return reply(cancel(db, page, who))


def pause(db: dependencies.Db, page: SetPage, who: Caller) -> SetPage:
    """The set, with its schedule paused."""
    need(who, Role.USER, project=page.set.project)
    schedules.pause(db, page.set.id, by=who.name)
    return sets.read_one(db, page.set.id) or page


def resume(db: dependencies.Db, page: SetPage, who: Caller) -> SetPage:
    """The set, whose schedule goes on."""
    need(who, Role.USER, project=page.set.project)
    schedules.go_on(db, page.set.id, now=datetime.now(UTC), by=who.name)
    return sets.read_one(db, page.set.id) or page


def cancel(db: dependencies.Db, page: SetPage, who: Caller) -> SetPage:
    """The set, cancelled; Refused if it is over."""
    need(who, Role.USER, project=page.set.project)
    try:
        control.cancel(db, page.set.id, by=who.name)
    except JobFinal as error:
        raise Refused(400, "already_final", str(error)) from error
    return sets.read_one(db, page.set.id) or page


def _submit(request: Request, db: dependencies.Db, who: Caller, document: Any, key: str | None) -> tuple[SetPage, bool]:
    if not isinstance(document, dict):
        message = "write an object with the fields of a spec and `matrix`, `search` or `schedule`"
        raise SpecError([Fault(path="", message=message)])
    sweep = parse_sweep(document)
    if who.project is not None and sweep.project == DEFAULT_PROJECT:  # not stated: the only one it may mean
        sweep = _move(sweep, who.project)
    need(who, Role.USER, project=sweep.project)
    targets = {(trial.spec.target, trial.spec.rent): trial.spec for trial in sweep.trials}
    for spec in targets.values():
        dependencies.need_trust(request, who, spec)
    row, new = control.submit_set_once(db, sweep, key=key, by=who.name)
    made = sets.read_one(db, row.id)
    assert made is not None
    return made, new


def _move(sweep: Sweep, project: str) -> Sweep:
    trials = tuple(replace(trial, spec=replace(trial.spec, project=project)) for trial in sweep.trials)
    return replace(sweep, project=project, trials=trials)
