"""`trainmaster jobs`: the list, newest first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect, sweep, warn_undriven
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError
from trainmaster.core.money.cost import submitter
from trainmaster.core.states import Status

if TYPE_CHECKING:
    from trainmaster.api.jobs import JobLine, JobsPage
    from trainmaster.api.sets import SetLine


def jobs(
    status: Annotated[Status | None, typer.Option(help="Only this status.")] = None,
    project: Annotated[str | None, typer.Option(help="Only this project.")] = None,
    find: Annotated[
        str | None, typer.Option(help="Only with an id that begins so, or this in the job's or the submitter's name.")
    ] = None,
    by: Annotated[str | None, typer.Option(help="Only by this submitter: the whole name.")] = None,
    name: Annotated[str | None, typer.Option("--set", help="The runs of this set.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of jobs.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="Number of jobs to skip.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """List jobs, newest first, with how far each is and how fast it goes. A set of runs is one line.

    `--json` prints jobs alone, the runs of sets among them: a set itself is `trainmaster show SET --json`.

    [bold]Examples[/]

      trainmaster jobs

      trainmaster jobs --status running --json

      trainmaster jobs --find llama

      trainmaster jobs --by ann@example.org

      trainmaster jobs --set lr-sweep

      trainmaster jobs --server https://trainmaster.example.org
    """
    plain = (status, find, by) == (None, None, None)
    with connect(home, server, reads=True) as source:
        if name is not None:
            if (unfolded := source.find_set(name)) is None:
                raise UsageError(f"there is no set of runs {name!r}")
            sweep.show(source, unfolded, name, json=json)
            return
        folded = plain and not json
        page = source.list(status=status, project=project, find=find, by=by, limit=limit, offset=offset, folded=folded)
        sets = source.sets(project=project) if folded and not offset else ()
        undriven = any(not line.final for line in page.jobs) and warn_undriven(source)
    if json:
        _console.as_json(page)
    elif not page.jobs and not sets:
        if plain and project is None and not offset:
            _console.note("no job yet; submit one with: trainmaster submit FILE.yaml")
        else:
            asked = {"--status": status and status.value, "--project": project, "--find": find, "--by": by}
            words = " ".join(f"{option} {value}" for option, value in asked.items() if value is not None)
            if offset:
                words = f"{words} --offset {offset}".strip()
            _console.note(_console.plain(f"no job for {words}; `trainmaster jobs` lists all"))
    else:
        _print(page, offset, sets, undriven=undriven)


def _print(page: JobsPage, offset: int, sets: Sequence[SetLine], *, undriven: bool) -> None:
    named = any(line.submitted_by for line in page.jobs)  # on a home folder alone nobody has a name
    columns = (
        "job",
        "name",
        "project",
        *(("by",) if named else ()),
        "status",
        "stage",
        "step",
        "loss",
        "tokens/s",
        "age",
    )
    rows: list[tuple[str, ...]] = []
    for folded in sets:
        done = f"{folded.counts.get('completed', 0)}/{folded.trials}"
        loss = f"{folded.best_loss:.4f}" if folded.best_loss is not None else ""
        who = (escape(submitter(folded.submitted_by)),) if named else ()
        state, stage = _console.paint(folded.status), _stage(folded)
        cells = (folded.id[:8], escape(folded.name), escape(folded.project), *who, state, stage, done, loss, "")
        rows.append((*cells, age(folded.created_at)))
    for line in page.jobs:
        cells = (
            line.id[:8],
            escape(line.name),
            escape(line.project),
            *((escape(submitter(line.submitted_by)),) if named else ()),
            _console.paint(line.status) + _remark(line, undriven=undriven),
            line.stage or "",
            _steps(line),
            line.loss_text or (f"{line.loss:.4f}" if line.loss is not None else ""),
            f"{line.tokens_per_s:,.0f}" if line.tokens_per_s is not None else "",
            age(line.created_at),
        )
        rows.append(cells)
    _console.out.print(_fit(columns, rows), crop=False)
    shown = len(page.jobs)
    if shown < page.total:
        _console.note(f"{shown} of {page.total}; --offset {offset + shown} shows more")


# Left out in this order where the terminal is narrow; `--json` has all. A name is cut after the first two.
_SPARED = ("tokens/s", "stage", "project", "by", "loss")
_SHORTEST = 16  # a name


def _fit(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """The table in the width of the terminal, one line a job: with every column where they fit, and in a pipe."""
    widths = {
        column: max(len(column), *(_console.out.render_str(row[place]).cell_len for row in rows), 0)
        for place, column in enumerate(columns)
    }
    shown, name, whole = list(columns), widths["name"], 0
    is_narrow = _console.out.is_terminal or "COLUMNS" in os.environ
    for left_out in range(len(_SPARED) + 1):
        shown = [column for column in columns if column not in _SPARED[:left_out]]
        whole = sum(widths[column] for column in shown) + 2 * (len(shown) - 1)
        over = whole - _console.out.width if is_narrow else 0
        name = max(widths["name"] - max(over, 0), min(_SHORTEST, widths["name"]))
        if over <= 0 or (left_out >= 2 and over <= widths["name"] - name):
            break
    table = Table(box=None, header_style="dim", pad_edge=False, width=None if is_narrow else whole)
    for column in shown:
        table.add_column(
            column,
            justify="right" if column in ("step", "loss", "tokens/s", "age") else "left",
            no_wrap=True,
            max_width=name if column == "name" else None,
        )
    for row in rows:
        table.add_row(*(cell for column, cell in zip(columns, row, strict=True) if column in shown))
    return table


def _stage(line: SetLine) -> str:
    if line.schedule is None or line.status.final:
        return "set"
    at = f"{line.next_at.astimezone():%m-%d %H:%M}" if line.next_at is not None else "never"
    return "paused" if line.paused else f"next {at}"


def _remark(line: JobLine, *, undriven: bool) -> str:
    if undriven and not line.final:
        return " [dim](not driven)[/]"
    return f" [dim]({line.reason})[/]" if line.reason else ""


def _steps(line: JobLine) -> str:
    if line.step is None:
        return ""
    return f"{line.step}/{line.steps}" if line.steps is not None else str(line.step)  # a program of your own has no end


def age(then: datetime) -> str:
    """How long ago, in one unit."""
    seconds = (datetime.now(UTC) - then).total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
