"""`trainmaster cancel`: ask a job to save and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._jobs import wait as wait_for
from trainmaster.cli._server import ServerOption

if TYPE_CHECKING:
    from trainmaster.api.jobs import Job, JobLine


def cancel(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Return when everything it held is given back.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Cancel a job: it is asked to save, killed after its grace, and all it held is given back.

    Where no server or worker drives the job, this command does it and returns when the job has ended.

    [bold]Examples[/]

      trainmaster cancel 3f2a

      trainmaster cancel llama-trial --wait
    """
    with connect(home, server) as jobs:
        asked: Job | JobLine = jobs.cancel(jobs.find(job))
        if not wait and not jobs.is_driven():
            _console.note("no server or worker runs on this home folder: this command stops the job itself")
            wait = True
        if wait:
            with jobs.drive(asked.id):
                asked = wait_for(jobs, asked.id)
    if json:
        fields = ("id", "name", "project", "status", "stage", "reason")
        _console.as_json({name: getattr(asked, name) for name in fields})
    else:
        _console.out.print(f"{asked.name} {asked.id}: {_console.paint(asked.status)}")
