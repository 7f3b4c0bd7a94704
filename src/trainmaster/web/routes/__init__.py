"""REST API: one file for each group of paths, with a `router` that api.py lists."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.dependencies.models import Dependant
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from trainmaster.api.codec import to_json
from trainmaster.api.health import Error
from trainmaster.api.paths import TRAINING as TRAINING
from trainmaster.core.errors import Fault
from trainmaster.web.errors import Refused

# A range: the errors of the middlewares (401, 403, 413, 421, 429) are the same for every route.
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "Refused, with the reason"},
    "503": {"model": Error, "description": "The database, the storage or a target is unavailable; retry later"},
}


class Body(BaseModel):
    """The body of a request. A field that it does not have is refused."""

    model_config = ConfigDict(extra="forbid")


def group(name: str, *, prefix: str = "") -> APIRouter:
    """A router whose paths document their errors."""
    return APIRouter(prefix=prefix, tags=[name], responses=ERRORS, dependencies=[Depends(_know_the_query)])


async def _know_the_query(request: Request) -> None:
    """Refuse an unknown query parameter: a misspelt filter must not return everything."""
    if not request.query_params:
        return
    # From the route itself: the whole OpenAPI document takes most of a second, in which nothing else is answered.
    if unknown := sorted(request.query_params.keys() - _query_names(request.scope["route"].dependant)):
        faults = [Fault(path=name[:100], message="unknown parameter") for name in unknown]
        raise Refused(400, "unknown_parameter", f"unknown parameter: {', '.join(unknown)[:200]}", faults=faults)


def _query_names(dependant: Dependant) -> set[str]:
    own = {field.alias for field in dependant.query_params}
    return own.union(*map(_query_names, dependant.dependencies))


def reply(value: object, *, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A shape as JSON. It is not validated here; the tests compare it with the OpenAPI document."""
    assert is_dataclass(value) and fields(value)
    return Response(to_json(value), status_code=status_code, headers=headers, media_type="application/json")
