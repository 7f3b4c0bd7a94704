"""Search: one word over jobs, failures, nodes and GPUs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from trainmaster.api.search import SearchPage
from trainmaster.pages import search
from trainmaster.web import dependencies
from trainmaster.web.routes import group, reply

router = group("search")
Words = Annotated[
    str, Query(pattern=r"^[^\x00]*$", max_length=search.LONGEST, description="a name, an id, a serial number, a text")
]


@router.get("/v1/search", response_model=SearchPage)
def find(request: Request, db: dependencies.Db, who: dependencies.Viewer, q: Words = "") -> Response:
    """Jobs by name or id, failures by text, nodes by name and GPUs by serial number, in the caller's projects."""
    home = request.app.state.home if who.project is None else None
    return reply(search.read(db, q, project=who.project, home=home))
