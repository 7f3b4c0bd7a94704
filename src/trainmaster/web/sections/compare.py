"""Compare: runs side by side. The whole choice is in the address, so that a comparison is saved as a link."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from trainmaster.api.compare import ComparedRun
from trainmaster.core.clean_text import cell, clean
from trainmaster.core.ids import is_uuid
from trainmaster.core.money.cost import submitter
from trainmaster.pages import compare
from trainmaster.store.page_rows.runs import find_runs, list_choices
from trainmaster.web import dependencies, rows
from trainmaster.web.sections.compared import ComparedCurves
from trainmaster.web.sections.form import clean_word, link
from trainmaster.web.templating import render

router = APIRouter(include_in_schema=False)
_OFFERED = 50  # jobs of the picker: fewer than the parameters that an address may have
_FIELDS, _METRICS = 4, 6  # columns of the final values
_MANY = 40  # runs; above it curves have fewer points
# The first columns of the CSV file.
_OURS = (
    "id", "name", "project", "target", "submitted_by", "status", "created_at", "duration_s", "cost_cents", "step",
)  # fmt: skip
_ROWS, _KEYS = 50, 40  # shown at first: what a page of 200 has more takes longer to lay out than all the rest of it
Ids = Annotated[list[str], Query(max_length=compare.MOST)]
Metric = Annotated[str, Query(max_length=200)]


@router.get("/compare")
def show_comparison(
    *,
    db: dependencies.Db,
    who: dependencies.Viewer,
    job: Ids = [],  # noqa: B006 (FastAPI copies it)
    jobs: str = "",
    metric: Metric = "loss",
    group: Metric = "",
    find: str = "",
    without: str = "",
    sort: Metric = "",
    every: bool = False,
    log: bool = False,
    time: bool = False,
) -> Response:
    """The runs of `jobs` (ids with commas between) and of every `job`; without any, the picker alone.

    `sort` is a metric, `:step`, `:took` or `:cost`, with `-` in front of it from the highest; `every` shows all rows.
    """
    ids, find = [each for each in _ids(jobs, job) if each != without], clean_word(find)
    page = compare.read(db, ids=ids, metric=metric, group=group or None, project=who.project)
    offered = list_choices(db, project=who.project, word=find or None, limit=_OFFERED)
    chosen = [run.id for run in page.runs]

    def here(**changes: object) -> str:
        asked = {"jobs": ",".join(chosen), "metric": metric if metric != "loss" else None, "group": page.group}
        asked |= {"sort": sort or None, "every": "1" if every else None}
        asked |= {"log": "1" if log else None, "time": "1" if time else None}
        return link("/compare", **{**asked, **changes})

    fields = [part.field for part in page.differences if part.field != "name"][:_FIELDS]
    columns, colours = page.metrics[:_METRICS], _colours(page.runs)
    listed = _sorted(page.runs, sort)[: None if every else _ROWS]
    keys = _keys(page.runs, colours)
    return render(
        "compare.html",
        page=page,
        here=here,
        offered=offered,
        chosen=frozenset(chosen),
        hidden=",".join(sorted(set(chosen) - {row.id for row in offered})),
        find=find,
        fields=fields,
        columns=columns,
        rows=rows.compared(listed, fields=fields, metrics=columns, colours=colours),
        shown=len(listed),
        sort=sort,
        every=every,
        charted=[(run.id, _label(run), colours[run.id]) for run in page.runs],
        keys=keys[:_KEYS],
        unkeyed=len(keys[_KEYS:]),
        brief=rows.brief,
        projects=len({run.project for run in page.runs}),
        log=log,
        time=time,
        who=who,
    )


@router.get("/compare.csv")
def compare_csv(
    *,
    db: dependencies.Db,
    who: dependencies.Viewer,
    job: Ids = [],  # noqa: B006 (FastAPI copies it)
    jobs: str = "",
    sort: Metric = "",
) -> Response:
    """The table of a comparison: every run, every field that differs, and every final value."""
    page = compare.read(db, ids=_ids(jobs, job), project=who.project)
    fields = [part.field for part in page.differences if part.field != "name"]
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(_name_columns(fields, page.metrics))
    for run in _sorted(page.runs, sort):
        table.writerow([
            run.id, cell(run.name), cell(run.project), cell(run.target),
            cell(submitter(run.submitted_by)), run.status.value, run.created_at.isoformat(),
            run.duration_s, run.cost_cents, run.step,
            *(cell(run.fields[field]) for field in fields),
            *(run.values.get(name, run.texts.get(name)) for name in page.metrics),
        ])  # fmt: skip
    name = 'attachment; filename="comparison.csv"'
    return Response(text.getvalue(), media_type="text/csv", headers={"Content-Disposition": name})


def _name_columns(fields: Sequence[str], metrics: Sequence[str]) -> list[str]:
    """Names of columns, each once: who reads a table by name would take a metric `id` of a job for its id."""
    names = list(_OURS)
    for prefix, some in (("spec:", fields), ("metric:", metrics)):
        for own in some:
            name = cell(own)
            while name in names:
                name = f"{prefix}{name}"
            names.append(name)
    return names


@router.get("/compare/curves")
def list_curves(
    *,
    request: Request,
    db: dependencies.Db,
    who: dependencies.Viewer,
    jobs: str = "",
    metric: Metric = "loss",
    of: int = 1,
) -> Response:
    """Points of one metric of each of these runs, for the chart. `of`: how many runs the whole chart has."""
    cache: ComparedCurves = request.app.state.compared
    ids = _ids(jobs, [])
    with db.read() as conn:
        found = find_runs(conn, ids, project=who.project)
    points = compare.POINTS if of <= _MANY else compare.POINTS // 2
    parts = [
        cache.read(job, metric=metric, points=points, final=found[job].status.final) for job in ids if job in found
    ]
    return Response(f'{{"curves":[{",".join(parts)}]}}', media_type="application/json")


def _ids(text: str, more: list[str]) -> list[str]:
    """Ids of jobs, each once; whatever else an address has is dropped."""
    words = [word.strip() for part in (text, *more) for word in part.split(",")]
    return list(dict.fromkeys(word for word in words if is_uuid(word)))[: compare.MOST]


def _sorted(runs: Sequence[ComparedRun], sort: str) -> list[ComparedRun]:
    """By a column; runs without its value last, whichever way."""
    word = sort.removeprefix("-")

    def value(run: ComparedRun) -> float | None:
        columns = {":step": run.step, ":took": run.duration_s, ":cost": run.cost_cents}
        return columns[word] if word in columns else run.values.get(word)

    known = [(found, run) for run in runs if (found := value(run)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=sort != word)
    return [run for _, run in known] + [run for run in runs if value(run) is None]


def _label(run: ComparedRun) -> str:
    """The name of a run at a pointer in the chart."""
    return f"{clean(run.name)} · {rows.brief_text(clean(run.group))}" if run.group else clean(run.name)


def _colours(runs: tuple[ComparedRun, ...]) -> dict[str, int]:
    """By run: the number of its colour; runs of one group share one."""
    groups = {value: place for place, value in enumerate(dict.fromkeys(run.group for run in runs if run.group))}
    return {run.id: groups[run.group] if run.group else place for place, run in enumerate(runs)}


def _keys(runs: tuple[ComparedRun, ...], colours: Mapping[str, int]) -> list[tuple[str, int]]:
    """The legend: each group, or each run, with its colour. Runs of one name have their id beside it."""
    if any(run.group for run in runs):
        return list({run.group or run.name: colours[run.id] for run in runs}.items())
    names = Counter(run.name for run in runs)
    return [(run.name if names[run.name] == 1 else f"{run.name} {run.id[:8]}", colours[run.id]) for run in runs]
