"""`trainmaster show`: one job with its status, its reason and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect, sweep, warn_undriven
from trainmaster.cli._jobs.place import find_place
from trainmaster.cli._server import ServerOption
from trainmaster.cli._views import plot
from trainmaster.core.money.cost import price_words, submitter
from trainmaster.core.states import Status

if TYPE_CHECKING:
    from trainmaster.api.jobs import Attempt, JobName, JobPage, Transition
    from trainmaster.api.run import IterationSummary
    from trainmaster.api.webhooks import Delivery


def show(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name; or a set.")],
    transitions: Annotated[
        bool, typer.Option("--transitions", help="Print every change of its stage instead.")
    ] = False,
    deliveries: Annotated[
        bool, typer.Option("--deliveries", help="Print the deliveries of its notifications instead.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Show one job: status, reason and what to do, pre-flight, figures, attempts, loss curve.

    Of a set of runs: its status, its cost, and the table of results with the best marked.

    [bold]Examples[/]

      trainmaster show 3f2a

      trainmaster show demo --json

      trainmaster show demo --transitions

      trainmaster show lr-sweep
    """
    with connect(home, server, reads=True) as jobs:
        if (found := jobs.find_set(job)) is not None:
            sweep.show(jobs, found, job, json=json)
            return
        job_id = jobs.find(job)
        if transitions or deliveries:
            rows = jobs.transitions(job_id) if transitions else jobs.deliveries(job_id)
            _print_rows(rows, json=json, name="transitions" if transitions else "deliveries")
            return
        page = jobs.show(job_id)
        if not page.final:
            warn_undriven(jobs)
        place = find_place(jobs, page.id, page.project) if page.status is Status.PENDING and not json else {}
    if json:
        _console.as_json(page)
    else:
        _print(page, place)


def _print(page: JobPage, place: Mapping[str, str]) -> None:
    run = page.run
    _console.out.print(f"[bold]{escape(page.name)}[/] {page.id}")
    rows = {
        "status": _status(page),
        "reason": f"{page.reason}: {escape(page.message)}" if page.reason else escape(page.message),
        "cancelled by": escape(page.cancelled_by or ""),
        **place,
        "careful": escape("; ".join(filter(None, (page.careful, *run.warnings)))),
        "to do": escape(page.to_do or ""),
        "again from": _name(page.again_of),
        "continues": _name(page.continues),
        "continued as": _name(page.continued_as),
        "submitted": _submitted(page),
        "target": escape(page.target),
        "machine": escape(_machine(page)),
        "price": _price(page),
        "pre-flight": _console.paint(run.preflight.overall) if run.preflight and run.preflight.overall else None,
        "step": f"{run.step} of {run.steps}" if run.step is not None and run.steps is not None else run.step,
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
        _print_attempt(attempt, known=page.message)
    for iteration in run.iterations:
        _print_iteration(iteration, final=page.final)
    for line in plot.curve(run.curves.loss, width=60, height=8):
        _console.out.out(line)


def _print_attempt(attempt: Attempt, *, known: str) -> None:
    """One attempt with the last lines of its log, without text that was printed already (`known`)."""
    ended = f": {attempt.reason}" if attempt.reason else ""
    if attempt.reason and attempt.message not in known:
        ended += f" {escape(attempt.message)}"
    if attempt.recovered_s is not None:
        ended += f" (first training step {attempt.recovered_s:,.0f} s after the last event of the attempt before)"
    _console.out.print(f"attempt {attempt.number:<3} {attempt.report or 'placed'}{ended}")
    lines = [str(line) for line in attempt.evidence.get("last_lines") or []]
    if len(lines) == 1 and attempt.reason and lines[0].strip() in attempt.message:
        return
    for line in lines:
        _console.out.print(f"    [dim]{escape(line)}[/]")


def _print_iteration(iteration: IterationSummary, *, final: bool) -> None:
    """One iteration with its phases, its newest epochs and its evaluations."""
    from trainmaster.report.phrases import metrics_text

    took = f" {iteration.seconds:,.1f} s" if iteration.seconds is not None else ""
    phases = [f"{p.kind} {p.seconds:,.1f} s" if p.seconds is not None else p.kind for p in iteration.phases]
    state = "completed" if iteration.completed else "its end was not reported" if final else "running"
    parts = f" ({', '.join(phases)})" if phases else ""
    _console.out.print(f"iteration {iteration.number}: {state}{took}{parts}", soft_wrap=True)
    for epoch in iteration.newest_epochs:
        loss = f" loss {epoch.avg_loss:.4f}" if epoch.avg_loss is not None else ""
        _console.out.print(f"    epoch {epoch.number} of {iteration.epochs}{loss}")
    for evaluation in iteration.evaluations:
        named = f" {escape(evaluation.model_id)}" if evaluation.model_id else ""
        figures = escape(metrics_text(evaluation.metrics))
        _console.out.print(f"    evaluation{named} {figures}".rstrip(), soft_wrap=True)


def _print_rows(rows: Sequence[Transition | Delivery], *, json: bool, name: str) -> None:
    if json:
        _console.as_json({name: rows})
        return
    columns = _TRANSITION if name == "transitions" else _DELIVERY
    table = _console.table(*(_TITLES.get(column, column) for column in columns))
    for row in rows:
        table.add_row(*(_cell(getattr(row, column)) for column in columns))
    _console.out.print(table)


_TRANSITION = ("at", "stage_from", "stage_to", "status", "reason", "message")
_DELIVERY = ("at", "topic", "channel", "state", "tries", "status", "error")
_TITLES = {"at": "time", "stage_from": "from", "stage_to": "to", "status": "status"}


def _cell(value: object) -> str:
    if isinstance(value, datetime):
        return f"{value.astimezone():%Y-%m-%d %H:%M:%S}"
    return "" if value is None else escape(str(value))


def _status(page: JobPage) -> str:
    stage = f" · {page.stage}" if page.stage and str(page.stage) != str(page.status) else ""
    return _console.paint(page.status) + stage


def _name(job: JobName | None) -> str | None:
    return f"{escape(job.name)} {job.id}" if job is not None else None


def _submitted(page: JobPage) -> str | None:
    if page.created_at is None:
        return None
    by = f"by {escape(submitter(page.submitted_by))}"
    return f"{page.created_at.astimezone():%Y-%m-%d %H:%M} {by}, project {escape(page.project)}"


def _machine(page: JobPage) -> str:
    """Names of the newest attempt's machines, or the one that its events come from."""
    names = page.attempts[-1].machines if page.attempts else ()
    return ", ".join(names) or page.run.host or ""


def _price(page: JobPage) -> str | None:
    if page.price_cents_per_hour is None and not page.cost_cents:
        return None
    return price_words(page.price_cents_per_hour, page.cost_cents, final=page.status.final)


def _loss(page: JobPage) -> str | None:
    first, last = page.run.loss_first, page.run.loss_last
    if first is None or last is None:
        return (page.run.loss_text or "no number") if page.run.sick_since is not None else None
    if page.run.sick_since is not None:
        sick = page.run.loss_text or "no number"
        return f"{first:.4f} → {sick} (last number {last:.4f} at step {page.run.loss_last_step})"
    return f"{first:.4f} → {last:.4f}"
