"""The page of search results."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from trainmaster.pages import search
from trainmaster.web import dependencies
from trainmaster.web.templating import render

router = APIRouter(include_in_schema=False)
_KINDS = {"job": "Jobs", "failure": "Failures", "node": "Nodes", "gpu": "GPUs"}


@router.get("/search")
def find(db: dependencies.Db, who: dependencies.Viewer, q: str = "") -> Response:
    """Everything the words are found in, by kind."""
    return render("search.html", page=search.read(db, q, project=who.project), kinds=_KINDS, who=who)
