"""`trainmaster goodput`: what the GPUs of a job, a project or a month did, in GPU-hours and money."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.cli._views.month_option import parse_month
from trainmaster.core.errors import UsageError
from trainmaster.core.money.cost import dollars
from trainmaster.core.money.goodput.bins import PRODUCTIVE, Bin

if TYPE_CHECKING:
    from trainmaster.api.goodput import Goodput, GoodputPage, GoodputSum, JobGoodput

_BAR, _BESIDE = 28, 52  # characters of the longest bar, and of the longest words beside it: a line of 80


def goodput(
    job: Annotated[str | None, typer.Argument(help="One job: its id, the beginning of it, or its name.")] = None,
    project: Annotated[str | None, typer.Option(help="Only this project.")] = None,
    month: Annotated[str | None, typer.Option(help="A calendar month in UTC, as 2026-11.", show_default="this")] = None,
    all_time: Annotated[bool, typer.Option("--all", help="From the beginning instead of one month.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of jobs listed; the sums cover all.")] = 10,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Show what GPUs did: every GPU-second in one bin, with its money, ETTR and Google's goodput.

    A GPU is a rank of the spec. Times come from what was recorded; what no record tells is `unknown`, as the work of a
    program that reports no steps. ETTR and the bins are defined in docs/how/goodput.md.

    [bold]Examples[/]

      trainmaster goodput 3f2a

      trainmaster goodput --project llama --month 2026-11

      trainmaster goodput --all --json
    """
    if job is not None and (project or month or all_time):
        raise UsageError("one job is shown whole; leave out --project, --month and --all")
    when = None if all_time or job is not None else parse_month(month)
    with connect(home, server, reads=True) as jobs:
        if job is not None:
            job_id = jobs.find(job)
            ledger, device = jobs.job_goodput(job_id), jobs.show(job_id).run.device
            if json:
                _console.as_json(ledger)
            else:
                _print_job(ledger, unit="slot" if device == "cpu" else "GPU")  # as its page says
            return
        page = jobs.goodput(project=project, month=when, limit=limit)
    if json:
        _console.as_json(page)
        return
    if not page.total.jobs:
        of = f" of project {project}" if project else ""
        _console.note(f"no job{of} was there {f'in {page.month}' if page.month else 'so far'}")
        return
    _print_page(page)


def _print_job(job: JobGoodput, *, unit: str) -> None:
    gpus = f"{job.gpus} {unit}{'s' if job.gpus != 1 else ''}"
    _console.out.print(f"[bold]{escape(job.name)}[/] {job.id[:8]}, {escape(job.target)}, {gpus}, {job.status.value}")
    _print_bins(job.goodput, unit=unit)
    for note in job.notes:
        _console.note(note)


def _print_page(page: GoodputPage) -> None:
    name = f"project {escape(page.project)}" if page.project else "all projects"
    _console.out.print(f"[bold]{name}[/], {page.month or 'from the beginning'}: {_count(page.total.jobs)}")
    _print_bins(page.total.goodput)
    if page.total.goodput.unpriced_jobs:
        _console.note(f"{page.total.goodput.unpriced_jobs} of {_count(page.total.jobs)} without a known price")
    for title, sums in (("project", page.projects), ("target", page.targets), ("month", page.months)):
        if len(sums) > 1:
            _print_sums(title, sums)
    table = _table("job", "name", "project", "status", "GPU hours", "not productive", "ETTR", "most in")
    for job in page.jobs:
        lost = sum(line.gpu_hours for line in job.goodput.bins if Bin(line.bin) not in PRODUCTIVE)
        lost -= queued_hours(job.goodput)
        table.add_row(
            job.id[:8],
            escape(job.name),
            escape(job.project),
            _console.paint(job.status),
            f"{job.goodput.gpu_hours - queued_hours(job.goodput):,.2f}",
            f"{lost:,.2f}",
            _ettr(job.goodput),
            _worst(job.goodput),
        )
    _console.out.print()
    _console.out.print(table)
    if page.more:
        _console.note(f"and {page.more} that lost less; --limit shows more")


def _count(jobs: int) -> str:
    return f"{jobs} job{'s' if jobs != 1 else ''}"


def _print_bins(goodput: Goodput, *, unit: str = "GPU") -> None:
    table = _table("what", f"{unit} hours", "share", "", "money")
    longest = max(4, min(_BAR, _console.out.width - _BESIDE))
    top = max((line.share for line in goodput.bins), default=0.0)
    for line in goodput.bins:
        if not line.gpu_us:
            continue
        bin_ = Bin(line.bin)
        color = "green" if bin_ in PRODUCTIVE else "dim" if bin_ in (Bin.QUEUED, Bin.UNKNOWN) else "yellow"
        bar = "█" * math.ceil(longest * line.share / top - 0.5) if top else ""
        money = dollars(line.cents) if line.cents is not None else ""
        label = f"{bin_.label}, none held" if bin_ is Bin.QUEUED else bin_.label
        table.add_row(label, f"{line.gpu_hours:,.3f}", f"{line.share:.1%}", f"[{color}]{bar}[/]", money)
    whole, waited = dollars(goodput.cents) if goodput.cents is not None else "unknown", queued_hours(goodput)
    label = "held in all" if waited else "in all"
    table.add_row(f"[bold]{label}[/]", f"[bold]{goodput.gpu_hours - waited:,.3f}[/]", "", "", f"[bold]{whole}[/]")
    _console.out.print(table)
    values = {name: _percent(getattr(goodput, name)) for name in ("scheduling", "runtime", "program")}
    if goodput.runtime is not None and goodput.ettr != goodput.ettr_most:  # unknown time is not in it
        values["runtime"] = f"at least {values['runtime']}"
    parts = [f"{name} {value}" for name, value in values.items()]
    product = f" = {' × '.join(parts)}" if goodput.mpg is not None else f" ({', '.join(parts)})"
    ettr = f"ETTR [bold]{_ettr(goodput)}[/]"
    _console.out.print(f"{ettr}; goodput {_percent(goodput.mpg)}{product}", soft_wrap=True)


def _print_sums(title: str, sums: tuple[GoodputSum, ...]) -> None:
    table = _table(title, "jobs", "GPU hours", "money", "ETTR", "most in")
    for line in sums:
        money = dollars(line.goodput.cents) if line.goodput.cents is not None else "unknown"
        hours = f"{line.goodput.gpu_hours - queued_hours(line.goodput):,.2f}"
        table.add_row(escape(line.name), str(line.jobs), hours, money, _ettr(line.goodput), _worst(line.goodput))
    _console.out.print()
    _console.out.print(table)


def queued_hours(goodput: Goodput) -> float:
    """Hours for which a job waited for its GPUs: in the ledger, and not GPU hours that were used."""
    return sum(line.gpu_hours for line in goodput.bins if Bin(line.bin) is Bin.QUEUED)


def _worst(goodput: Goodput) -> str:
    """The bin that cost the most without being productive."""
    lost = [line for line in goodput.bins if Bin(line.bin) not in PRODUCTIVE and line.gpu_us]
    if not lost:
        return ""
    line = max(lost, key=lambda line: line.gpu_us)
    return f"{Bin(line.bin).label} {line.share:.0%}"


def _ettr(goodput: Goodput) -> str:
    """The ratio, or the range that unknown time leaves."""
    if goodput.ettr is None or goodput.ettr_most is None:
        return "unknown"
    low, high = _percent(goodput.ettr), _percent(goodput.ettr_most)
    return low if low == high else f"{low} to {high}"


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio:.1%}"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right", no_wrap=column in ("", "what"))
    return table


_WORDS = frozenset({"job", "name", "project", "target", "month", "status", "what", "", "most in"})
