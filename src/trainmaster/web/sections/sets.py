"""One set of runs: its status, its cost, the table of results, and the buttons that cancel and pause it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from trainmaster.core.roles import Role
from trainmaster.web import dependencies
from trainmaster.web.routes import sets
from trainmaster.web.templating import render

router = APIRouter(include_in_schema=False)


@router.get("/sets/{set_id}")
def show_set(page: sets.Found, who: dependencies.Viewer, part: bool = False) -> Response:
    """The set; with `part`, only the fragment that an open page replaces."""
    return render("set_part.html" if part else "set.html", page=page, who=who, may_act=who.may(Role.USER))


@router.post("/sets/{set_id}/cancel")
def cancel_set(page: sets.Found, db: dependencies.Db, who: dependencies.User) -> Response:
    """Cancel it, as the API does."""
    sets.cancel(db, page, who)
    return RedirectResponse(f"/sets/{page.set.id}", status_code=303)


@router.post("/sets/{set_id}/pause")
def pause_set(page: sets.Found, db: dependencies.Db, who: dependencies.User) -> Response:
    """Pause its schedule, as the API does."""
    sets.pause(db, page, who)
    return RedirectResponse(f"/sets/{page.set.id}", status_code=303)


@router.post("/sets/{set_id}/resume")
def resume_set(page: sets.Found, db: dependencies.Db, who: dependencies.User) -> Response:
    """Let its schedule go on, as the API does."""
    sets.resume(db, page, who)
    return RedirectResponse(f"/sets/{page.set.id}", status_code=303)
