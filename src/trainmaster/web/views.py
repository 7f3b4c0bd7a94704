"""Pages for people: the list of jobs, one job (live while it runs), its report, and the cancel button."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter
from starlette.responses import HTMLResponse, RedirectResponse, Response

from trainmaster.core.states import Status
from trainmaster.pages import job as job_page
from trainmaster.pages import jobs as jobs_page
from trainmaster.pages.job import JobPage
from trainmaster.report import html
from trainmaster.web import ask
from trainmaster.web.errors import not_found
from trainmaster.web.frame import render

FINAL = "Trainmaster-Final"  # a header that tells live.js to ask no more
router = APIRouter(include_in_schema=False)


@router.get("/")
def jobs(
    *,
    db: ask.Db,
    status: ask.StatusWord = None,
    project: ask.ProjectName = None,
    limit: ask.Limit = 50,
    offset: ask.Offset = 0,
    part: bool = False,
) -> Response:
    """The list; with `part`, only what the open page swaps in."""
    page = jobs_page.read(db, status=status, project=project, limit=limit, offset=offset)

    def link(**changes: object) -> str:
        """The address of this list with something changed; what is at its default is left out."""
        asked = {"status": status.value if status else None, "project": project, "limit": limit, "offset": offset}
        words = {name: value for name, value in {**asked, **changes}.items() if value not in (None, 0, "")}
        if words.get("limit") == 50:
            del words["limit"]
        return "/?" + urlencode(words) if words else "/"

    again = link() + ("&" if "?" in link() else "?") + "part=1"
    return render("jobs_part.html" if part else "jobs.html", page=page, link=link, statuses=list(Status), again=again)


@router.get("/jobs/{uuid}")
def job(job_id: ask.JobId, live: ask.Live) -> Response:
    return _job("job_page.html", live.read(job_id), job_id)


@router.get("/jobs/{uuid}/part")
def job_part(job_id: ask.JobId, live: ask.Live) -> Response:
    """What the open page swaps in every two seconds."""
    return _job("job_part.html", live.read(job_id), job_id)


@router.get("/jobs/{uuid}/report")
def report(job_id: ask.JobId, db: ask.Db) -> Response:
    """The self-contained file, as `trainmaster report` writes it."""
    page = job_page.read(db, job_id)
    if page is None:
        raise not_found(job_id)
    # Its style and script are inside it; the policy names them by hash and still refuses every other.
    policy = f"{html.policy()}; frame-ancestors 'none'"
    name = f'inline; filename="trainmaster-{page.id[:8]}.html"'
    return HTMLResponse(
        html.render_html(page), headers={"Content-Security-Policy": policy, "Content-Disposition": name}
    )


@router.post("/jobs/{uuid}/cancel")
def cancel(job_id: ask.JobId, db: ask.Db) -> Response:
    ask.cancel(db, job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


def _job(template: str, page: JobPage | None, job_id: str) -> Response:
    if page is None:
        raise not_found(job_id)
    answer = render(template, page=page, body=html.render_body(page))
    if page.status.final:
        answer.headers[FINAL] = "1"
    return answer
