"""HTML pages: the list of jobs, the report of one, and the buttons."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.responses import HTMLResponse, RedirectResponse, Response

from trainmaster.control import submit as submitting
from trainmaster.core.states import Status
from trainmaster.pages import jobs as jobs_page
from trainmaster.pages import sets as sets_page
from trainmaster.report import html
from trainmaster.web import dependencies
from trainmaster.web.errors import not_found
from trainmaster.web.routes import jobs as routes
from trainmaster.web.sections.form import Posted, clean_word, refuse_invalid
from trainmaster.web.templating import render

router = APIRouter(include_in_schema=False)
_SETS = 20  # newest, above the jobs
Sort = Literal["", "loss", "-loss", "tokens", "-tokens", "progress", "-progress", "cost", "-cost"]


@router.get("/")
def jobs(
    *,
    db: dependencies.Db,
    who: dependencies.Viewer,
    status: dependencies.StatusWord = None,
    project: Annotated[str | None, Query(pattern=dependencies.NAME)] = None,
    find: str = "",
    by: str = "",
    limit: dependencies.Limit = 50,
    offset: dependencies.Offset = 0,
    sort: Sort = "",
    part: bool = False,
) -> Response:
    """The list of jobs; with `part`, only the fragment that an open page replaces."""
    seen = dependencies.scope(who, project)
    find, by = clean_word(find), clean_word(by)
    most, skip = (jobs_page.SORTED, 0) if sort else (limit, offset)
    if status is None and not find and not by:  # a set is one row; its runs are on its own page
        page = sets_page.read_folded(db, project=seen, limit=most, offset=skip)
        sets = sets_page.read(db, project=seen, limit=_SETS).sets if not offset else ()
    else:
        page = jobs_page.read(
            db, status=status, project=seen, find=find or None, by=by or None, limit=most, offset=skip
        )
        sets = ()
    every, paid = page.total, jobs_page.has_costs(db, page)
    if sort:
        page = jobs_page.sort(page, sort, limit=limit, offset=offset)

    def link(**changes: object) -> str:
        """The URL of this list with changed parameters; defaults are left out."""
        asked = {"status": status.value if status else None, "project": project, "find": find, "by": by, "limit": limit}
        asked |= {"sort": sort, "offset": offset}
        words = {name: value for name, value in {**asked, **changes}.items() if value not in (None, 0, "")}
        if words.get("limit") == 50:
            del words["limit"]
        return "/?" + urlencode(words) if words else "/"

    again = link() + ("&" if "?" in link() else "?") + "part=1"
    template = "jobs_part.html" if part else "jobs.html"
    return render(
        template, page=page, link=link, statuses=list(Status), again=again, who=who, sets=sets, sort=sort, every=every,
        paid=paid,
    )  # fmt: skip


@router.get("/jobs/{uuid}/report")
def report(row: dependencies.Job, live: dependencies.Live) -> Response:
    """The self-contained report, as `trainmaster report` writes it."""
    page = live.read(row.id)
    if page is None:
        raise not_found(row.id)
    # Style and script are inline; the policy allows them by hash and no others.
    policy = f"{html.policy()}; frame-ancestors 'none'"
    name = f'inline; filename="trainmaster-{page.id[:8]}.html"'
    return HTMLResponse(
        html.render_html(page), headers={"Content-Security-Policy": policy, "Content-Disposition": name}
    )


@router.post("/jobs/{uuid}/cancel")
def cancel(row: dependencies.Job, db: dependencies.Db, who: dependencies.User) -> Response:
    dependencies.cancel(db, row, who)
    return RedirectResponse(f"/jobs/{row.id}", status_code=303)


@router.post("/jobs/{uuid}/priority")
def set_priority(
    request: Request, row: dependencies.Job, db: dependencies.Db, who: dependencies.User, form: Posted
) -> Response:
    """Change the priority of a job that waits, as the API does."""
    try:
        body = routes.PriorityBody.model_validate({"priority": form.required("priority")})
    except ValidationError as error:
        raise refuse_invalid(error) from None
    routes.change_priority(request, row, body, db, who)
    return RedirectResponse(f"/jobs/{row.id}", status_code=303)


@router.post("/jobs/{uuid}/resume")
def resume(request: Request, row: dependencies.Job, db: dependencies.Db, who: dependencies.User) -> Response:
    following, _ = routes.follow(request, row, db, who, submitting.resume)
    return RedirectResponse(f"/jobs/{following.id}", status_code=303)


@router.post("/jobs/{uuid}/rerun")
def rerun(request: Request, row: dependencies.Job, db: dependencies.Db, who: dependencies.User) -> Response:
    following, _ = routes.follow(request, row, db, who, submitting.run_again)
    return RedirectResponse(f"/jobs/{following.id}", status_code=303)
