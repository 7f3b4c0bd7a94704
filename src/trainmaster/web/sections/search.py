"""The page of search results."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from trainmaster.pages import search
from trainmaster.web import dependencies
from trainmaster.web.sections.form import link
from trainmaster.web.templating import render

router = APIRouter(include_in_schema=False)
_KINDS = {"job": "Jobs", "failure": "Failures", "node": "Nodes", "gpu": "GPUs"}


@router.get("/search")
def find(request: Request, db: dependencies.Db, who: dependencies.Viewer, q: str = "") -> Response:
    """Everything the words are found in, by kind."""
    home = request.app.state.home if who.project is None else None  # the operator's checks are of the whole server
    return render(
        "search.html", page=search.read(db, q, project=who.project, home=home), link=link, kinds=_KINDS, who=who
    )
