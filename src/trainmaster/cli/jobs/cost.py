"""`trainmaster cost`: what jobs and projects cost, what they will cost, and what a project may spend."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect, sweep
from trainmaster.cli._server import ServerOption
from trainmaster.cli._views.month_option import parse_month
from trainmaster.core.errors import UsageError
from trainmaster.core.money.cost import dollars, submitter

if TYPE_CHECKING:
    from trainmaster.api.costs import BudgetLine, CostPage
    from trainmaster.core.money.cost import Cents

_CAP = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,62})=\$?([0-9]+(?:\.[0-9]{1,2})?|none)(?:/(month|total))?")


def cost(
    job: Annotated[str | None, typer.Argument(help="One job: its id, its beginning, or its name; or a set.")] = None,
    project: Annotated[str | None, typer.Option(help="Only this project.")] = None,
    month: Annotated[str | None, typer.Option(help="A calendar month in UTC, as 2026-11.", show_default="this")] = None,
    all_time: Annotated[bool, typer.Option("--all", help="From the beginning instead of one month.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of jobs listed; the sums cover all.")] = 20,
    set_cap: Annotated[
        list[str] | None,
        typer.Option(
            "--set-cap", help="Set the budget of a project: PROJECT=DOLLARS/month or /total; `none` removes it."
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Write every job and its cost to this file, or to -.", dir_okay=False),
    ] = None,
    sums: Annotated[
        bool, typer.Option("--sums", help="With --csv: sums of projects by person, target and status instead.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Show what jobs and projects cost, and set what a project may spend.

    A cost is unknown without a price (resources.price_per_hour in the spec, or the target). A job over its
    own limits.max_cost or its project's budget is asked to save and stop.

    [bold]Examples[/]

      trainmaster cost

      trainmaster cost --project llama --month 2026-11 --json

      trainmaster cost 3f2a

      trainmaster cost --month 2026-11 --csv november.csv

      trainmaster cost --set-cap llama=5000/month --set-cap trial=none/total
    """
    if job is not None and (project or month or all_time or set_cap):
        raise UsageError("one job is shown whole; leave out --project, --month, --all and --set-cap")
    if (csv is None and sums) or (csv is not None and (job is not None or set_cap or json)):
        raise UsageError("--csv goes with --project, --month, --all and --sums alone; --sums needs --csv")
    caps = [_parse_cap(text) for text in set_cap or ()]
    when = None if all_time or job is not None else parse_month(month)
    with connect(home, server, reads=True) as jobs:
        if job is not None and (found := jobs.find_set(job)) is not None:
            sweep.show(jobs, found, job, json=json)
            return
        for name, period, cents in caps:
            jobs.set_budget(name, period, cents)
            _note_budget(name, period, cents)
        if csv is not None:
            _write(csv, jobs.cost_csv(each="projects" if sums else "jobs", project=project, month=when))
            return
        job_id = jobs.find(job) if job else None
        page = jobs.cost(job_id=job_id, project=project, month=when, limit=limit)
    if json:
        _console.as_json(page)
        return
    if not page.jobs and not page.projects:
        of = f" of project {project}" if project else ""
        _console.note(f"no job{of} ran {f'in {page.month}' if page.month else 'so far'}")
    _print(page, single=job is not None)


def _write(file: Path, pieces: Iterable[str]) -> None:
    if str(file) == "-":
        for piece in pieces:
            sys.stdout.write(piece)
        return
    try:
        with file.open("w", encoding="utf-8", newline="") as text:
            text.writelines(pieces)
    except OSError as error:
        raise UsageError(f"--csv {file}: cannot be written ({error.strerror})") from None
    _console.note(f"wrote {file}")


def _print(page: CostPage, *, single: bool) -> None:
    named = any(line.submitted_by for line in page.jobs)  # on a home folder alone nobody has a name
    by = ("by",) if named else ()
    jobs = _table("job", "name", "project", *by, "status", "cost", "per hour", "forecast", "cap")
    for line in page.jobs:
        jobs.add_row(
            line.id[:8],
            escape(line.name),
            escape(line.project),
            *((escape(submitter(line.submitted_by)),) if named else ()),
            _console.paint(line.status),
            dollars(line.cents),
            dollars(line.cents_per_hour) if line.cents_per_hour else "",
            f"at most {dollars(line.forecast_cents)}" if line.forecast_bound else dollars(line.forecast_cents),
            dollars(line.max_cost_cents) if line.max_cost_cents is not None else "",
        )
    if page.jobs:
        _console.out.print(jobs)
    if page.more:
        _console.note(f"and {page.more} that cost less; --limit shows more")
    if single:
        return
    sums = _table("project", "jobs", "GPU hours", f"cost {page.month or 'in all'}", "per hour")
    for total in page.projects:
        rate = dollars(total.cents_per_hour) if total.cents_per_hour else ""
        paid = _cost(total.known_cents, total.unknown_jobs)
        sums.add_row(escape(total.project), str(total.jobs), f"{total.gpu_hours:,.1f}", paid, rate)
    if page.projects:
        _console.out.print()
        _console.out.print(sums)
        _note_ended(page)
    for what, lines in (("person", page.people), ("target", page.targets)):
        if lines:
            used = _table(what, "attempts", "GPU hours", f"cost {page.month or 'in all'}")
            for of in lines:
                paid = _cost(of.known_cents, of.unknown_parts)
                used.add_row(escape(submitter(of.name)), f"{of.attempts:,}", f"{of.gpu_hours:,.1f}", paid)
            _console.out.print()
            _console.out.print(used)
    if page.budgets:
        budgets = _table("budget", "period", "spent", "cap", "share")
        for row in page.budgets:
            share = f"{row.share:.0%}" if row.share is not None else ""
            budgets.add_row(escape(row.project), row.period, _spent(row), dollars(row.cap_cents), share)
        _console.out.print()
        _console.out.print(budgets)


def _note_ended(page: CostPage) -> None:
    for cost, how in (
        (page.failed, "jobs that failed"),
        (page.limited, "jobs that a budget or a time limit ended"),
        (page.cancelled, "jobs that were cancelled"),
    ):
        if cost is None or not (cost.known_cents or cost.unknown_parts):
            continue
        unknown = f"{cost.unknown_parts:,} attempt{'s' if cost.unknown_parts != 1 else ''} without a price"
        parts = [dollars(cost.known_cents)] if cost.known_cents else []
        _console.note(f"of it {how}: {' and '.join([*parts, *([unknown] if cost.unknown_parts else [])])}")


def _cost(known_cents: Cents, unknown: int) -> str:
    if not unknown:
        return dollars(known_cents)
    return f"{dollars(known_cents)} and {unknown} of unknown price" if known_cents else "unknown"


def _spent(row: BudgetLine) -> str:
    if not row.unknown_jobs:
        return dollars(row.spent_cents)
    jobs = f"{row.unknown_jobs:,} job{'s' if row.unknown_jobs != 1 else ''}"
    return f"{dollars(row.spent_cents)} and {jobs} without a price"


def _table(*columns: str) -> Table:
    return _console.table(*columns, right=frozenset(columns) - _WORDS)


_WORDS = frozenset({"job", "name", "project", "person", "target", "by", "status", "budget", "period"})


def _parse_cap(text: str) -> tuple[str, str, int | None]:
    """PROJECT=DOLLARS/period as its parts; None dollars: no cap."""
    match = _CAP.fullmatch(text)
    if match is None:
        raise UsageError(f"--set-cap {text}: write PROJECT=DOLLARS/month or PROJECT=DOLLARS/total, as llama=5000/month")
    name, amount, period = match.groups()
    if amount == "none":
        return name, period or "month", None
    cents = math.floor(float(amount) * 100 + 0.5)
    if cents > 10**15:
        raise UsageError(f"--set-cap {text}: more money than there is")
    return name, period or "month", cents


def _note_budget(project: str, period: str, cents: int | None) -> None:
    when = "a month" if period == "month" else "in all"
    what = f"may spend {dollars(cents)} {when}" if cents is not None else f"has no budget {when} any more"
    _console.note(f"project {project} {what}")
