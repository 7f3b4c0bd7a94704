"""`trainmaster queue`: who waits, at which place and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect, warn_undriven
from trainmaster.cli._server import ServerOption
from trainmaster.cli._views.sets import next_text, wait_text
from trainmaster.cli.jobs.jobs import age
from trainmaster.core.config.queue import PRIORITIES
from trainmaster.core.errors import UsageError
from trainmaster.core.money.cost import submitter

if TYPE_CHECKING:
    from trainmaster.api.queue import QueueLine, QueuePage

_RIGHT = ("place", "waits")
_WHY = 40  # characters; with less room beside the job, its reason stands below
_SHARE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,62})=([0-9]{1,6}|none)(?:/([0-9]{1,3}(?:\.[0-9]+)?))?")


def queue(
    project: Annotated[str | None, typer.Option(help="Only this project.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of jobs.")] = 50,
    set_share: Annotated[
        list[str] | None,
        typer.Option(
            "--set-share",
            help="Set what a project may have: PROJECT=DEVICES or PROJECT=DEVICES/WEIGHT; `none`: no limit.",
        ),
    ] = None,
    set_priority: Annotated[
        list[str] | None,
        typer.Option(
            "--set-priority",
            help="Change the priority of a job that waits: JOB=low, normal, high or urgent. It keeps what it waited.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """List the jobs that wait: their place, why, what is before them, and when they are expected to start.

    A place is one in our own queue, for machines that have none (`local`, `ssh`). Where Slurm or Kubernetes queue, the
    reason is theirs. Trials of a set that have not begun are no jobs yet: a line below counts them. Another
    line has the next run of each schedule.

    [bold]Examples[/]

      trainmaster queue

      trainmaster queue --project llama --json

      trainmaster queue --set-priority llama-trial=high

      trainmaster queue --set-share llama=4 --set-share trial=2/0.5
    """
    from trainmaster.queueing.words import say_others

    shares = [_parse_share(text) for text in set_share or ()]
    changes = [_parse_priority(text) for text in set_priority or ()]
    with connect(home, server, reads=True) as source:
        for job, priority in [(source.find(word), priority) for word, priority in changes]:
            changed = source.set_priority(job, priority)
            _console.note(f"{_console.plain(changed.name)} {changed.id} has the priority {priority}")
        for name, quota, weight in shares:
            source.set_share(name, weight=weight, quota=quota)
            most = f"at most {quota} device{'s' if quota != 1 else ''} at once" if quota is not None else "no limit"
            _console.note(f"project {name} has {most} and weight {weight:g}")
        page = source.queue(project=project, limit=limit)
        known = () if json else source.sets(project=project)
        sets = [line for line in known if line.counts.get("waiting")]
        if page.jobs or sets:
            warn_undriven(source)
    if json:
        _console.as_json(page)
        return
    if page.jobs:
        _print(page)
    for line in sets:
        _console.note(wait_text(line))
    for line in known:
        if line.schedule and not line.status.final:
            _console.note(f"{_console.plain(line.name)}: next run {next_text(line)}")
    if page.jobs or sets:
        if page.others:
            _console.note(f"{say_others(page.others)} too")
    else:
        _console.note(f"nothing of yours waits; {say_others(page.others)}" if page.others else "no job waits")


def _print(page: QueuePage) -> None:
    names = {line.job_id: line.name for line in page.jobs}
    rows = [_cells(line, names) for line in page.jobs]
    if len({line.submitted_by for line in page.jobs}) == 1:  # one person, who knows
        rows = [{column: text for column, text in row.items() if column != "by"} for row in rows]
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in rows[0]}
    if _console.out.width - sum(widths.values()) - 2 * len(widths) >= _WHY:
        table = Table(box=None, header_style="dim", pad_edge=False)
        for column in (*widths, "why"):
            table.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=column != "why")
        for row, line in zip(rows, page.jobs, strict=True):
            table.add_row(*map(escape, row.values()), escape(line.reason))
        _console.out.print(table)
    else:
        _print_narrow(page, rows, widths)
    if len(page.jobs) < page.total:
        _console.note(f"{len(page.jobs)} of {page.total}; --limit shows more")


def _print_narrow(page: QueuePage, rows: Sequence[Mapping[str, str]], widths: dict[str, int]) -> None:
    """Each job with its start and its reason on lines of their own below."""
    del widths["starts"], widths["before it"]
    over = sum(widths.values()) + 2 * (len(widths) - 1) - _console.out.width
    widths["name"] = max(min(widths["name"], 8), widths["name"] - max(0, over))
    _console.out.print(f"[dim]{_join({column: column for column in widths}, widths)}[/]")
    for row, line in zip(rows, page.jobs, strict=True):
        _console.out.print(escape(_join(row, widths)), overflow="fold")
        ahead = f"; before it: {row['before it']}" if row["before it"] else ""
        below = [line.reason + ahead]
        if line.expected_at is not None:  # on a line of its own, which no terminal breaks in a time
            below.append(f"starts {row['starts']}")
        for text in below:
            _console.out.print(Padding(_console.plain(text), (0, 0, 0, widths["place"] + 2), expand=False))


def _join(row: Mapping[str, str], widths: Mapping[str, int]) -> str:
    cells = []
    for column, width in widths.items():
        text = row[column] if len(row[column]) <= width else row[column][: width - 1] + "…"
        cells.append(f"{text:>{width}}" if column in _RIGHT else f"{text:<{width}}")
    return "  ".join(cells).rstrip()


def _cells(line: QueueLine, names: Mapping[str, str]) -> dict[str, str]:
    from trainmaster.queueing.words import AT_THE_LATEST, say_before

    latest = AT_THE_LATEST if line.expected_latest else ""
    return {
        "place": str(line.position) if line.position is not None else "",
        "job": line.job_id[:8],
        "name": line.name,
        "project": line.project,
        "by": submitter(line.submitted_by),
        "target": line.target,
        "priority": line.priority,
        "needs": _needs(line),
        "waits": age(line.since),
        "before it": say_before(line.position, line.before, names),
        "starts": f"{line.expected_at:%m-%d %H:%M} UTC{latest}" if line.expected_at is not None else "not known",
    }


def _needs(line: QueueLine) -> str:
    return f"{line.nodes} × {line.processes_per_node}" if line.nodes > 1 else str(line.processes_per_node)


def _parse_priority(text: str) -> tuple[str, str]:
    """JOB=PRIORITY as its parts."""
    job, _, priority = text.rpartition("=")
    if not job or priority not in PRIORITIES:
        raise UsageError(f"--set-priority {text}: write JOB=PRIORITY with one of {', '.join(PRIORITIES)}, as 3f2a=high")
    return job, priority


def _parse_share(text: str) -> tuple[str, int | None, float]:
    """PROJECT=DEVICES/WEIGHT as its parts; None devices: no limit."""
    match = _SHARE.fullmatch(text)
    weight = float(match[3] or 1) if match is not None else 0.0
    if match is None or not weight > 0:
        raise UsageError(f"--set-share {text}: write PROJECT=DEVICES or PROJECT=DEVICES/WEIGHT, as llama=4/2")
    return match[1], None if match[2] == "none" else int(match[2]), weight
