"""Follow one job to its end: stages, check results, a progress bar with loss and throughput."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trainmaster.cli._console import out, paint

if TYPE_CHECKING:
    from trainmaster.api.events import Event
    from trainmaster.api.jobs import JobLine
    from trainmaster.cli._jobs import Jobs

_EVERY_S = 0.5  # two requests a poll; a server admits 100 a second
_WAITING = ("placing", "provisioning", "connecting", "staging")  # a machine may boot for half an hour, without events
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

    def show_event(self, row: Event) -> None:
        data = row.data
        match row.phase, row.event:
            case "PREFLIGHT", "start":
                self.skipped = 0  # of this attempt, not of all
            case "PREFLIGHT", "check":
                self._check(row)
            case "PREFLIGHT", "end":
                self._line(f"pre-flight {paint(str(data.get('overall')))} [dim]({self.skipped} do not apply here)[/]")
            case "TRAINING", "start":
                self._start(row)
            case "STEP", "metrics":
                self._step(row)
            case "EVAL_MODEL", "metrics":
                self._line(f"eval at step {data.get('step')}: loss {_number(data.get('loss'), '.4f')}")
            case "CHECKPOINT", "saved":
                seconds = _number(data.get("seconds"), ".2f")
                self._line(f"[dim]checkpoint at step {data.get('step')} saved in {seconds} s[/]")
            case "CHECKPOINT", ("rejected" | "failed"):
                self._line(f"[red]checkpoint {row.event}[/]: {escape(str(data.get('why')))}")
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
        step, loss = int(row.data.get("step") or 0), _number(row.data.get("loss"), ".4f")
        rate = f"{_number(row.data.get('tokens_per_s'), ',.0f')} tok/s"
        if self.bar is not None:
            self.progress.update(self.bar, completed=step, loss=f"loss {loss}", rate=rate)
        elif step == 1 or step * _PLAIN_SHARE // max(self.steps, 1) != (step - 1) * _PLAIN_SHARE // max(self.steps, 1):
            out.print(f"step {step}/{self.steps} loss {loss} {rate}")

    def _line(self, text: str) -> None:
        self.progress.console.print(text, soft_wrap=True)


def _number(value: object, form: str) -> str:
    """A number from a node as text; what is none is shown as it came."""
    return format(value, form) if isinstance(value, (int, float)) else escape(str(value))
