"""HTML pages: the list of jobs, one job (live while it runs), its report, and the buttons."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from trainmaster.api.goodput import JobGoodput
from trainmaster.api.jobs import JobPage
from trainmaster.control import submit as submitting
from trainmaster.core.money.goodput.bins import PRODUCTIVE, Bin
from trainmaster.core.roles import Role
from trainmaster.core.states import Status
from trainmaster.pages import deliveries, transitions
from trainmaster.pages import jobs as jobs_page
from trainmaster.report import html
from trainmaster.store.database import Database
from trainmaster.web import dependencies
from trainmaster.web.auth import Caller
from trainmaster.web.errors import not_found
from trainmaster.web.templating import render

FINAL = "Trainmaster-Final"  # a header that stops the polling of live.js
router = APIRouter(include_in_schema=False)
_BIN_LABELS = {bin_.value: bin_.label for bin_ in Bin}
_BIN_ABOUTS = {bin_.value: bin_.about for bin_ in Bin}
_LOST = (Bin.REPEATED, Bin.STALLED, Bin.SAVE_STALL, Bin.IDLE)
_UNHELD = (Bin.QUEUED, Bin.UNKNOWN)
_BIN_TONES = {
    bin_.value: "good" if bin_ in PRODUCTIVE else "bad" if bin_ in _LOST else "idle" if bin_ in _UNHELD else "warn"
    for bin_ in Bin
}


@router.get("/")
def jobs(
    *,
    db: dependencies.Db,
    who: dependencies.Viewer,
    status: dependencies.StatusWord = None,
    project: Annotated[str | None, Query(pattern=dependencies.NAME)] = None,
    find: str = "",
    limit: dependencies.Limit = 50,
    offset: dependencies.Offset = 0,
    part: bool = False,
) -> Response:
    """The list of jobs; with `part`, only the fragment that an open page replaces."""
    seen = dependencies.scope(who, project)
    find = find.replace("\x00", "").strip()[:63]  # PostgreSQL has no NUL in a text
    page = jobs_page.read(db, status=status, project=seen, find=find or None, limit=limit, offset=offset)

    def link(**changes: object) -> str:
        """The URL of this list with changed parameters; defaults are left out."""
        asked = {"status": status.value if status else None, "project": project, "find": find, "limit": limit}
        asked["offset"] = offset
        words = {name: value for name, value in {**asked, **changes}.items() if value not in (None, 0, "")}
        if words.get("limit") == 50:
            del words["limit"]
        return "/?" + urlencode(words) if words else "/"

    again = link() + ("&" if "?" in link() else "?") + "part=1"
    template = "jobs_part.html" if part else "jobs.html"
    return render(template, page=page, link=link, statuses=list(Status), again=again, who=who)


@router.get("/jobs/{uuid}")
def job(
    db: dependencies.Db,
    row: dependencies.Job,
    live: dependencies.Live,
    ledgers: dependencies.LedgersKept,
    who: dependencies.Viewer,
) -> Response:
    return _job(db, "job_page.html", live.read(row.id), row.id, who, goodput=ledgers.read(row.id))


@router.get("/jobs/{uuid}/part")
def job_part(
    db: dependencies.Db,
    row: dependencies.Job,
    live: dependencies.Live,
    ledgers: dependencies.LedgersKept,
    who: dependencies.Viewer,
) -> Response:
    """The fragment that an open page replaces every two seconds."""
    return _job(db, "job_part.html", live.read(row.id), row.id, who, goodput=ledgers.read(row.id))


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


@router.post("/jobs/{uuid}/resume")
def resume(request: Request, row: dependencies.Job, db: dependencies.Db, who: dependencies.User) -> Response:
    with dependencies.creating():
        dependencies.need_trust(request, who, row.spec)
        following, _ = submitting.resume(db, row.id, by=who.name)
    return RedirectResponse(f"/jobs/{following.id}", status_code=303)


@router.post("/jobs/{uuid}/rerun")
def rerun(request: Request, row: dependencies.Job, db: dependencies.Db, who: dependencies.User) -> Response:
    with dependencies.creating():
        dependencies.need_trust(request, who, row.spec)
        following, _ = submitting.run_again(db, row.id, by=who.name)
    return RedirectResponse(f"/jobs/{following.id}", status_code=303)


def _job(
    db: Database, template: str, page: JobPage | None, job_id: str, who: Caller, *, goodput: JobGoodput | None
) -> Response:
    if page is None:
        raise not_found(job_id)
    may = {"may_act": who.may(Role.USER), "may_admin": who.may(Role.ADMIN)}
    moves = transitions.read(db, job_id).transitions
    sent = deliveries.read(db, job=job_id).deliveries if may["may_admin"] else ()
    answer = render(
        template,
        page=page,
        body=html.render_body(page),
        goodput=goodput,
        bin_labels=_BIN_LABELS,
        bin_abouts=_BIN_ABOUTS,
        bin_tones=_BIN_TONES,
        who=who,
        transitions=moves,
        deliveries=sent,
        **may,
    )
    if page.status.final:
        answer.headers[FINAL] = "1"
    return answer
