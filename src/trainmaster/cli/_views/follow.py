"""Follow one job to its end: stages, check results, a progress bar with loss and throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trainmaster.cli._console import out, paint

if TYPE_CHECKING:
    from trainmaster.api.events import Event
    from trainmaster.api.jobs import JobLine
    from trainmaster.cli._jobs import Jobs

_EVERY_S = 0.5  # two requests a poll; a server admits 100 a second
_WAITING = ("placing", "provisioning", "connecting", "staging")  # a machine may boot for half an hour, without events
_PARTS = {
    "ITERATION": "iteration", "TRAJECTORY": "trajectories", "TRAINING": "training", "EVAL_TRAINING": "evaluation",
}  # fmt: skip
_MOST_FIGURES = 6  # of one event in its line
_PLAIN_SHARE = 10  # without a terminal, a line at every tenth of the steps


def follow(jobs: Jobs, job_id: str, *, tick: Callable[[], None] = lambda: None, view: View | None = None) -> JobLine:
    """Show the job until it is final; `tick` is called between two polls. A view goes on where it stopped."""
    view = view or View()
    with view.progress:
        while True:
            job = jobs.line(job_id)
            # The state is read first: once it is final, all its events are recorded and none is missed.
            for event in jobs.events(job_id, after=view.after):
                view.show_event(event)
                view.after = event.cursor
            view.show_job(job)
            if job.final:
                return job
            tick()
            time.sleep(_EVERY_S)


class View:
    """What is on the screen: lines that stay, and one bar that moves."""

    def __init__(self) -> None:
        self.progress = Progress(
            TextColumn("[cyan]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("[bold]{task.fields[loss]}"),
            TextColumn("[dim]{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=out,
            transient=False,
            disable=not out.is_terminal,
        )
        self.stage, self.message = "", ""
        self.after: tuple[int, int] | None = None  # the last event that was shown
        self.steps = 0
        self.skipped = 0  # findings that do not apply; the report tells each with its reason
        self.bar = None if not out.is_terminal else self.progress.add_task("waiting", total=1, loss="", rate="")

    def show_job(self, job: JobLine) -> None:
        stage = str(job.stage or job.status)
        if stage != self.stage:
            self.stage, self.message = stage, ""
            if self.bar is not None:
                self.progress.update(self.bar, description=stage)
            else:
                out.print(f"stage {stage}")
        if job.message and job.message != self.message and stage in _WAITING:
            self.message = job.message
            self._line(f"[dim]  {escape(job.message)}[/]")

    def show_event(self, row: Event) -> None:  # noqa: PLR0912 (one case for each event)
        data = row.data
        match row.phase, row.event:
            case "PREFLIGHT", "start":
                self.skipped = 0  # of this attempt, not of all
            case "PREFLIGHT", "check":
                self._check(row)
            case "PREFLIGHT", "end":
                self._line(f"pre-flight {paint(str(data.get('overall')))} [dim]({self.skipped} do not apply here)[/]")
            case "TRAINING", "start" if "ranks" in data:
                self._start(row)
            case "TRAINING", "end" if "tokens_per_s" in data or "loss_last" in data:
                pass  # our trainer's; the summary tells it
            case "STEP", "metrics":
                self._step(row)
            case "EVAL_MODEL", "metrics":
                self._line(_evaluation(data))
            case "TRAINING", "epoch_complete":
                epoch = row.epoch if row.epoch is not None else data.get("epoch", "")
                self._line(f"epoch {epoch}{_of(row)}{_figures({k: v for k, v in data.items() if k != 'epoch'})}")
            case (("ITERATION" | "TRAJECTORY" | "EVAL_TRAINING" | "TRAINING"), ("start" | "end")):
                self._line(_boundary(row))
            case (("START" | "RECOVERY"), _):
                if line := _start_line(row):
                    self._line(line)
            case "CHECKPOINT", "saved":
                step = f" at step {data['step']}" if data.get("step") is not None else ""
                took = f" in {_number(data['seconds'], '.2f')} s" if data.get("seconds") is not None else ""
                self._line(f"[dim]checkpoint{step} saved{took}[/]")
            case "CHECKPOINT", ("rejected" | "failed"):
                why = data.get("why") or data.get("message") or "no reason stated"
                self._line(f"[red]checkpoint {row.event}[/]: {escape(str(why))}")
            case _:
                pass

    def _check(self, row: Event) -> None:
        for finding in row.data.get("findings") or []:
            if finding.get("verdict") == "skip":
                self.skipped += 1
                continue
            name = f"{row.data.get('check')} {finding.get('device') or ''}".strip()
            verdict = paint(str(finding.get("verdict")), width=6)
            self._line(f"  {verdict}{escape(f'{name:<16}')} {escape(str(finding.get('reason')))}")

    def _start(self, row: Event) -> None:
        data = row.data
        self.steps = int(data.get("steps") or 0)
        ranks = "rank" if data.get("ranks") == 1 else "ranks"
        resumed = f", resumed from step {data['resumed_from']}" if data.get("resumed_from") else ""
        self._line(
            f"training {_number(data.get('parameters'), ',d')} parameters on {data.get('ranks')} {ranks} "
            f"({escape(str(data.get('device_name') or data.get('device')))}, {data.get('precision')}){resumed}"
        )
        if self.bar is not None:
            self.progress.update(self.bar, total=max(self.steps, 1), completed=data.get("resumed_from") or 0)

    def _step(self, row: Event) -> None:
        data = row.data
        step = data.get("step")
        step = step if isinstance(step, int) else 0
        loss = f"loss {_number(data['loss'], '.4f')}" if data.get("loss") is not None else ""
        rate = f"{_number(data['tokens_per_s'], ',.0f')} tokens/s" if data.get("tokens_per_s") is not None else ""
        if self.bar is not None:
            self.progress.update(self.bar, completed=step, loss=loss, rate=rate)
        elif step == 1 or step * _PLAIN_SHARE // max(self.steps, 1) != (step - 1) * _PLAIN_SHARE // max(self.steps, 1):
            out.print(" ".join(filter(None, [f"step {step}" + (f"/{self.steps}" if self.steps else ""), loss, rate])))

    def _line(self, text: str) -> None:
        self.progress.console.print(text, soft_wrap=True)


def _start_line(row: Event) -> str | None:
    """A start or a recovery of the ranks, once it is over; a recovery also when it begins."""
    data, took = row.data, _number(row.data.get("seconds"), ".1f")
    if row.event == "start":
        how = {"spare": "with a spare node", "group": "one group"}.get(str(data.get("how")), "in place")
        return f"[yellow]recovering {how}[/]: {escape(str(data.get('message') or data.get('reason')))}"
    if row.event == "refused":
        return f"[yellow]not recovered in place[/]: {escape(str(data.get('why')))}"
    if row.event == "survived":
        groups = escape(f"{data.get('groups')} of {data.get('of')} groups go on")
        return f"[yellow]{groups}[/] after {took} s, at step {escape(str(data.get('step')))}{_parts(data)}"
    if row.event != "done":
        return None
    if row.phase == "START":
        return f"[dim]first step after {took} s{_parts(data)}[/]"
    return f"[yellow]recovered[/] in {took} s, at step {escape(str(data.get('step')))}{_parts(data)}"


def _parts(data: Mapping[str, Any]) -> str:
    """Seconds of each part of a start, largest first."""
    parts = data.get("parts")
    known = parts if isinstance(parts, Mapping) else {}
    times = {str(name): took for name, took in known.items() if isinstance(took, (int, float)) and took >= 0.05}
    shown = sorted(times.items(), key=lambda part: -part[1])[:_MOST_FIGURES]
    words = ", ".join(f"{escape(name.replace('_', ' '))} {took:.1f}" for name, took in shown)
    return f" ({words})" if words else ""


def _evaluation(data: Mapping[str, Any]) -> str:
    """An evaluation: our trainer states a step and its loss, another program whatever it measured."""
    nested = data.get("metrics")
    metrics = nested if isinstance(nested, Mapping) else data
    if isinstance(data.get("step"), int) and data.get("loss") is not None:
        return f"eval at step {data['step']}: loss {_number(data['loss'], '.4f')}"
    model = data.get("model_id") or data.get("model_path")
    named = f" of {escape(str(model))}" if model else ""
    return f"eval{named}{_figures(metrics)}"


def _boundary(row: Event) -> str:
    """Start or end of a part of the run, as its program reports it."""
    part = _PARTS[row.phase or ""]
    number = f" {row.iteration}" if row.phase == "ITERATION" and row.iteration is not None else ""
    inside = "" if row.phase == "ITERATION" else _of(row)
    if row.event == "start":
        return f"{part}{number}{inside} begins"
    stated = (row.data.get(name) for name in ("time_taken", "duration", "duration_s", "step_time"))
    seconds = next((value for value in stated if isinstance(value, (int, float))), None)
    return f"{part}{number}{inside} ends" + (f" after {seconds:,.1f} s" if seconds is not None else "")


def _of(row: Event) -> str:
    return f" of iteration {row.iteration}" if row.iteration is not None else ""


def _figures(data: Mapping[str, Any]) -> str:
    """The numbers of an event, a few of them, by name."""
    pairs = [(name, value) for name, value in data.items() if isinstance(value, (int, float)) and name != "iteration"]
    shown = ", ".join(f"{escape(str(name))} {value:.4g}" for name, value in pairs[:_MOST_FIGURES])
    return f": {shown}" if shown else ""


def _number(value: object, form: str) -> str:
    """A number from a node as text; what is none is shown as it came."""
    return format(value, form) if isinstance(value, (int, float)) else escape(str(value))
