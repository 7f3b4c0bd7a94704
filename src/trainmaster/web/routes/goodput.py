"""The goodput ledger: what the GPUs of a job, a project or a month did."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.responses import Response

from trainmaster.api.goodput import GoodputPage, JobGoodput
from trainmaster.api.timeline import Timeline
from trainmaster.pages import goodput, job_goodput, timeline
from trainmaster.web import dependencies
from trainmaster.web.errors import not_found
from trainmaster.web.routes import TRAINING, group, reply
from trainmaster.web.routes.costs import Month, parse_month

router = group("goodput")


@router.get(f"{TRAINING}/jobs/{{uuid}}/goodput", response_model=JobGoodput)
def find_job_goodput(job: dependencies.Job, db: dependencies.Db, month: Month = None) -> Response:
    """Every GPU-second of a job in one bin, with its money, ETTR and ML productivity goodput."""
    page = job_goodput.read(db, job.id, month=parse_month(month))
    if page is None:
        raise not_found(job.id)
    return reply(page)


@router.get(f"{TRAINING}/jobs/{{uuid}}/timeline", response_model=Timeline)
def find_timeline(job: dependencies.Job, ledgers: dependencies.LedgersKept) -> Response:
    """Bins with their money, stages of attempts and nodes, along the time of a job."""
    page, _ = ledgers.timeline(job.id)
    return reply(page or timeline.empty(job.id, start=job.created_at, now=datetime.now(UTC)))


@router.get("/v1/goodput", response_model=GoodputPage)
def list_goodput(
    db: dependencies.Db, project: dependencies.Project, month: Month = None, limit: dependencies.Limit = 20
) -> Response:
    """Sums by project, target and month, and the jobs that lost the most GPU-time; in a month, or in all."""
    return reply(goodput.read(db, project=project, month=parse_month(month), limit=limit))
