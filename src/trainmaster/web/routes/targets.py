"""Targets that the server knows: for its administrators. Everybody else names one in a spec."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from trainmaster.api.targets import KnownTarget, KnownTargets
from trainmaster.control import known_targets
from trainmaster.core.errors import Fault, UsageError
from trainmaster.web import dependencies
from trainmaster.web.errors import Refused
from trainmaster.web.routes import Body, group, reply

router = group("targets", prefix="/v1/targets")
TargetName = Annotated[str, Path(alias="name", pattern=f"^{known_targets.TARGET}$", description="name of the target")]


class TargetWish(Body):
    """A target to make known."""

    name: Annotated[str, StringConstraints(pattern=f"^{known_targets.NAME}$")] = Field(description="what specs write")
    word: str = Field(
        min_length=1, max_length=4096, description="what it stands for: kind:FILE with a path of the server"
    )


class GrantWish(Body):
    """The account of a project's jobs on a target."""

    user: Annotated[str, StringConstraints(pattern=f"^{known_targets.USER}$")] | None = Field(
        default=None, description="Unix user, or NAMESPACE[/SERVICE-ACCOUNT]; null: the account of the settings"
    )


@router.get("", response_model=KnownTargets)
def list_targets(db: dependencies.Db, who: dependencies.Operator) -> Response:  # noqa: ARG001 (asks for the role)
    """Targets by name, with the projects that may use each. Their settings are not shown."""
    return reply(KnownTargets(targets=tuple(known_targets.show(db))))


@router.post("", response_model=KnownTarget, status_code=201)
def add_target(wish: TargetWish, request: Request, db: dependencies.Db, who: dependencies.Operator) -> Response:
    """Make a target known. 422 where its file cannot be used; what the file holds is not repeated."""
    state = request.app.state
    with dependencies.creating():
        known_targets.add(db, wish.name, wish.word, home=state.home, storage=state.storage.url, by=who.name)
    return reply(known_targets.show(db, wish.name)[0], status_code=201)


@router.get("/{name}", response_model=KnownTarget)
def find_target(name: TargetName, db: dependencies.Db, who: dependencies.Operator) -> Response:  # noqa: ARG001
    """One target."""
    return reply(_find(db, name))


@router.delete("/{name}", status_code=204, response_class=Response)
def remove_target(name: TargetName, db: dependencies.Db, who: dependencies.Operator) -> Response:
    """Forget a target. 409 while open jobs run there."""
    _find(db, name)
    try:
        known_targets.remove(db, name, by=who.name)
    except UsageError as error:
        raise Refused(409, "in_use", str(error)) from error
    return Response(status_code=204)


@router.put("/{name}/projects/{project}", response_model=KnownTarget)
def grant_target(
    name: TargetName, project: dependencies.ProjectName, wish: GrantWish, db: dependencies.Db,
    who: dependencies.Operator,
) -> Response:  # fmt: skip
    """Let the jobs of a project run there as this account. 422 where it is the server's own, or another project's."""
    try:
        known_targets.grant(db, name, project, user=wish.user, by=who.name)
    except UsageError as error:
        fault = Fault(path="user", message=str(error))
        raise Refused(422, "bad_account", "the account cannot be used; nothing was changed", faults=[fault]) from error
    return reply(_find(db, name))


@router.delete("/{name}/projects/{project}", status_code=204, response_class=Response)
def revoke_target(
    name: TargetName, project: dependencies.ProjectName, db: dependencies.Db, who: dependencies.Operator
) -> Response:
    """Take a target away from a project. Its jobs that run go on."""
    with dependencies.finding():
        known_targets.revoke(db, name, project, by=who.name)
    return Response(status_code=204)


def _find(db: dependencies.Db, name: str) -> KnownTarget:
    with dependencies.finding():
        return known_targets.show(db, name)[0]
