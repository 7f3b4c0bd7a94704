"""The page of one run: its status and curves, and a tab for each kind of detail."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response, StreamingResponse

from trainmaster.api.events import Events
from trainmaster.api.jobs import JobPage
from trainmaster.api.run import Preflight
from trainmaster.control.queueing import priority
from trainmaster.core.clean_text import cell
from trainmaster.core.config.queue import PRIORITIES
from trainmaster.core.money.goodput.bins import PRODUCTIVE, Bin
from trainmaster.core.results import Overall, Verdict
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage
from trainmaster.pages import artifacts, checks, deliveries, events, job_cost, queue
from trainmaster.pages.parts.downsample import sick_text
from trainmaster.report import html
from trainmaster.store import jobs
from trainmaster.store.database import Database
from trainmaster.store.page_rows import figures
from trainmaster.store.rows import JobRow
from trainmaster.web import dependencies, rows
from trainmaster.web.errors import not_found
from trainmaster.web.kept import Kept
from trainmaster.web.sections.queue import FRESH_S, MOST
from trainmaster.web.templating import render

FINAL = "Trainmaster-Final"  # a header that stops the polling of live.js
TABS = (
    ("", "Overview"), ("logs", "Logs"), ("events", "Events"), ("checkpoints", "Checkpoints"),
    ("preflight", "Pre-flight"), ("attempts", "Attempts"), ("cost", "Cost"), ("files", "Files"), ("spec", "Spec"),
)  # fmt: skip
_EVENTS = 50  # on one page; of 100 server and browser have twice the work before the first is shown
_MACHINES = 20  # whose checks are shown whole; of 512 they were a page of 4 MB
_BATCH = 5_000  # rows of a CSV file read at once
router = APIRouter(include_in_schema=False)
_LOST = (Bin.REPEATED, Bin.STALLED, Bin.SAVE_STALL, Bin.IDLE)
_UNHELD = (Bin.QUEUED, Bin.UNKNOWN)


def _tone(bin_: Bin) -> str:
    return "good" if bin_ in PRODUCTIVE else "bad" if bin_ in _LOST else "idle" if bin_ in _UNHELD else "warn"


BINS: dict[str, Any] = {
    "bin_labels": {bin_.value: bin_.label for bin_ in Bin},
    "bin_words": {bin_.value: (bin_.label, _tone(bin_)) for bin_ in Bin},
    "bin_abouts": {bin_.value: bin_.about for bin_ in Bin},
    "bin_tones": {bin_.value: _tone(bin_) for bin_ in Bin},
}


@router.get("/jobs/{uuid}")
@router.get("/jobs/{uuid}/part")
def overview(
    *, request: Request, row: dependencies.Job, live: dependencies.Live, ledgers: dependencies.LedgersKept,
    who: dependencies.Viewer, db: dependencies.Db, kept: dependencies.Answers,
) -> Response:  # fmt: skip
    """The page, or the fragment that an open page replaces every two seconds."""
    page, whole = live.glance(row.id)
    if page is None:
        raise not_found(row.id)
    goodput, goodput_whole = ledgers.glance(row.id)
    template = "run_part.html" if request.scope["path"].endswith("/part") else "run.html"
    answer = render(
        template, whole=whole and goodput_whole, goodput=goodput, tab="", tabs=TABS, who=who,
        may_act=who.may(Role.USER), waiting=_find_place(db, kept, row), **html.context(page), **BINS,
    )  # fmt: skip
    if page.status.final and whole and goodput_whole:
        answer.headers[FINAL] = "1"
    return answer


@router.get("/jobs/{uuid}/curves.csv")
def curves_csv(row: dependencies.Job, db: dependencies.Db) -> Response:
    """Every metric of every step, as it was written."""
    name = f'attachment; filename="{row.name}-{row.id[:8]}-curves.csv"'
    return StreamingResponse(_csv(db, row.id), media_type="text/csv", headers={"Content-Disposition": name})


@router.get("/jobs/{uuid}/{tab}")
def detail(
    *,
    row: dependencies.Job,
    tab: str,
    db: dependencies.Db,
    live: dependencies.Live,
    ledgers: dependencies.LedgersKept,
    who: dependencies.Viewer,
    after: str = "",
    phase: str = "",
    node: str = "",
) -> Response:
    """One tab. Each is a page of its own, so that it works without a script and can be linked to."""
    if tab not in dict(TABS) or tab == "":
        raise HTTPException(404)
    page, whole = live.glance(row.id)
    if page is None:
        raise not_found(row.id)
    more: dict[str, Any] = {}
    if tab == "events":
        listed, beyond = _events(db, row.id, after, phase)
        more = {"events": listed, "rows": rows.events(listed.events), "more": beyond}
        more |= {"after": after, "phase": phase[:64]}
    elif tab == "preflight":
        checked = _checked(db, page, first=node)
        more = {"checked": checked, "most_machines": _MACHINES}
    elif tab == "files":
        more = {"files": artifacts.read(db, row.id).artifacts}
    elif tab == "cost":
        ledger, ledger_whole = ledgers.glance(row.id)
        more = {"cost": job_cost.read(db, row.id), "goodput": ledger, "whole": whole and ledger_whole, **BINS}
    elif tab == "attempts":
        sent = deliveries.read(db, job=row.id).deliveries if who.may(Role.ADMIN) else ()
        more = {"transitions": jobs.list_transitions(db, row.id), "deliveries": sent}
    known = {"page": page, "whole": whole, "tab": tab, "tabs": TABS, "who": who, "may_act": who.may(Role.USER)}
    return render("run_tab.html", **{**known, **html.context(page, drawn=False), **more})


def _checked(db: Database, page: JobPage, *, first: str) -> tuple[tuple[str, Preflight], ...]:
    """Each machine with its checks, where a job has several: the one that was asked for, then that of bad news."""
    shown = page.run.preflight
    if shown is None:
        return ()
    tried = next((each for each in page.attempts if each.number == shown.attempt), None)
    # The first node may be ready while others still check: none of them is accused before a step or the end.
    over = tried is None or tried.ended_at is not None or page.run.step is not None
    found = checks.read_nodes(db, page.id, shown, machines=tried.machines if tried is not None else (), over=over)
    passed = {Overall.PASS: 2, Overall.WARN: 1}

    def order(one: tuple[str, Preflight]) -> int:
        if one[0] == first:
            return -1
        if one[1].overall is not None:
            return passed.get(one[1].overall, 0)
        return 0 if any(check.verdict in (Verdict.FAIL, Verdict.ERROR) for check in one[1].checks) else 3

    return tuple(sorted(found, key=order))


def _find_place(db: Database, kept: Kept, row: JobRow) -> dict[str, Any] | None:
    """The line of a waiting job among those of its project, where it is one of the first, and what is before it."""
    if row.stage is not Stage.QUEUED:
        return None
    key = ("queue", row.project, 0)  # as the page Queue of the project keeps it
    page = kept.read(key, lambda: queue.read(db, project=row.project, limit=MOST), for_s=FRESH_S)
    line = next((each for each in page.jobs if each.job_id == row.id), None)
    choices = PRIORITIES if priority.may_change(row) else ()
    before = queue.describe_before(page).get(row.id, "")
    return {"line": line, "before": before, "priority": row.spec.queue.priority, "choices": choices}


def _events(db: Database, job_id: str, after: str, phase: str) -> tuple[Events, bool]:
    """One page, and whether there is another."""
    number, _, offset = after.partition(":")
    known = number.isdecimal() and offset.isdecimal() and len(number) < 10 and len(offset) < 19
    place = (int(number), int(offset)) if known else None
    phase = phase.replace("\x00", "")[:64]
    listed = events.read(db, job_id, after=place, limit=_EVENTS + 1, phase=phase or None)
    if len(listed.events) <= _EVENTS:
        return listed, False
    shown = listed.events[:_EVENTS]
    return dataclasses.replace(listed, events=shown, next="{}:{}".format(*shown[-1].cursor)), True


def _csv(db: Database, job_id: str) -> Iterator[str]:
    """Lines of a CSV file, a batch at a time. Names of metrics are those of the first batch, and those found later."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["attempt", "time", "kind", "step", "metric", "value"])
    after: tuple[int, int] | None = None
    while batch := figures.scan_figures(db, job_id, after=after, limit=_BATCH):
        for row in batch:
            kind = "eval" if row.phase == "EVAL_MODEL" else "step"
            if row.phase == "CHECKPOINT":
                continue
            at = row.ts.isoformat() if row.ts is not None else ""
            for name, value in _numbers(row.data):
                if name != "step":
                    table.writerow([row.cursor[0], at, kind, row.data.get("step"), cell(name), value])
        after = batch[-1].cursor
        yield text.getvalue()
        text.seek(0)
        text.truncate()
        if len(batch) < _BATCH:
            break
    yield text.getvalue()


def _numbers(data: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Metrics of a row. One that is no number is a row too: without it a run that diverged looks as if it had ended."""
    for name, value in data.items():
        if sick_text(data, name) is not None:
            yield name, float(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
