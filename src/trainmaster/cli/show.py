"""`trainmaster show`: one job, with why it is where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect, warn_undriven
from trainmaster.cli._server import ServerOption
from trainmaster.cli._views import plot

if TYPE_CHECKING:
    from trainmaster.api.jobs import JobPage


def show(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Show one job: status, reason and what to do, pre-flight, figures, attempts, loss curve.

    [bold]Examples[/]

      trainmaster show 3f2a

      trainmaster show demo --json
    """
    with connect(home, server) as jobs:
        found = jobs.show(jobs.find(job))
        if not found.final:
            warn_undriven(jobs)
    if json:
        _console.as_json(found)
    else:
        _print(found)


def _print(page: JobPage) -> None:
    run = page.run
    _console.out.print(f"[bold]{escape(page.name)}[/] {page.id}")
    rows = {
        "status": _console.paint(page.status) + (f" · {page.stage}" if page.stage else ""),
        "reason": f"{page.reason}: {escape(page.message)}" if page.reason else escape(page.message),
        "to do": page.action,
        "pre-flight": _console.paint(run.preflight.overall) if run.preflight and run.preflight.overall else None,
        "step": f"{run.step} of {run.steps}" if run.step is not None else None,
        "loss": _loss(page),
        "throughput": f"{run.tokens_per_s:,.0f} tokens/s" if run.tokens_per_s is not None else None,
        "ranks": f"{run.ranks} on {escape(run.device_name or run.device or '?')}" if run.ranks else None,
        "duration": f"{page.duration_s:,.0f} s" if page.duration_s is not None else None,
        "garbage": f"{run.garbage_lines} lines of the event file" if run.garbage_lines else None,
    }
    for name, value in rows.items():
        if value:
            _console.out.print(f"{name:<11} {value}")
    for attempt in page.attempts:
        ended = f": {attempt.reason} {escape(attempt.message)}" if attempt.reason else ""
        _console.out.print(f"attempt {attempt.number:<3} {attempt.report or 'placed'}{ended}")
        for line in attempt.evidence.get("last_lines") or []:
            _console.out.print(f"    [dim]{escape(str(line))}[/]")
    for line in plot.curve(run.curves.loss, width=60, height=8):
        _console.out.out(line)


def _loss(page: JobPage) -> str | None:
    first, last = page.run.loss_first, page.run.loss_last
    return f"{first:.4f} → {last:.4f}" if first is not None and last is not None else None
