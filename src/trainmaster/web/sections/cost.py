"""Cost: by project, person, target and month, budgets and forecast, goodput in money, idle rented machines."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from trainmaster.api.goodput import Goodput
from trainmaster.core.money.goodput.bins import Bin
from trainmaster.core.money.goodput.tally import Tally
from trainmaster.pages import goodput, spending
from trainmaster.web import dependencies
from trainmaster.web.ledgers import Sums
from trainmaster.web.sections.form import link
from trainmaster.web.sections.run import BINS
from trainmaster.web.templating import render

router = APIRouter(include_in_schema=False)
_FRESH_S = 30.0  # every attempt of half a year is in it
_LOST = (Bin.REPEATED, Bin.STALLED, Bin.SAVE_STALL, Bin.IDLE, Bin.DATA_WAIT, Bin.STRAGGLER_WAIT)
_LOST_WORDS = f"{', '.join(bin_.label for bin_ in _LOST[:-1])} and {_LOST[-1].label}"


@router.get("/cost")
def show_costs(
    *,
    db: dependencies.Db,
    who: dependencies.Viewer,
    ledgers: dependencies.LedgersKept,
    kept: dependencies.Answers,
    month: Annotated[str, Query(pattern=r"^(20[0-9][0-9]-(0[1-9]|1[0-2])|all|)$")] = "",
    project: Annotated[str, Query(pattern=f"{dependencies.NAME}|^$")] = "",
) -> Response:
    """The costs of the caller's project, or of all; of the present month unless another is named."""
    now = datetime.now(UTC)
    when = None if month == "all" else datetime.strptime(month or f"{now:%Y-%m}", "%Y-%m").replace(tzinfo=UTC)
    seen = dependencies.scope(who, project or None)
    # Every figure of the page is of one moment, that of the sums over all jobs, whichever project is looked at: a
    # part would be larger than the whole otherwise.
    sums = ledgers.recent()
    at = sums.made_at if sums is not None else None
    page = kept.read(
        ("cost", seen, when, at), lambda: spending.read(db, project=seen, month=when, now=at or now), for_s=_FRESH_S
    )

    def here(**changes: object) -> str:
        return link("/cost", **{"month": month, "project": project, **changes})

    ledger = _ledger(sums, seen)
    return render(
        "cost.html",
        page=page,
        here=here,
        here_project=lambda name: here(project=name),
        here_person=lambda name: link("/", by=name, project=project),
        chosen=project,
        may_set=who.runs_server,
        set_budget=f"{link('/settings', project=seen)}#projects",
        csv=lambda each: link("/v1/cost.csv", month=when and f"{when:%Y-%m}", project_id=seen, each=each),
        ledger=ledger,
        lost=sum(line.cents or 0.0 for line in ledger.bins if Bin(line.bin) in _LOST) if ledger is not None else None,
        lost_words=_LOST_WORDS,
        **BINS,
        who=who,
    )


def _ledger(sums: Sums | None, project: str | None) -> Goodput | None:
    """What the GPUs did, of all months; None until it was added up once, or for a project that is not listed alone."""
    if sums is None:
        return None
    whole = Tally()
    for name, tally in sums.projects.items():
        if project is None or name == project:
            whole.add(tally)
    return goodput.shape(whole) if whole.total_us else None
