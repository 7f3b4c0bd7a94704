"""`trainmaster cancel`: ask a job to save and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect, sweep
from trainmaster.cli._jobs import wait as wait_for
from trainmaster.cli._server import ServerOption

if TYPE_CHECKING:
    from trainmaster.api.jobs import Job, JobLine


def cancel(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name; or a set.")],
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Return when everything it held is given back.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Cancel a job: it is asked to save, killed after its grace, and all it held is given back.

    Of a set of runs no further trial begins, and those that are open are cancelled. A schedule ends with its set;
    `trainmaster pause` keeps it.

    Where no server or worker drives the job, this command does it and returns when the job has ended.

    [bold]Examples[/]

      trainmaster cancel 3f2a

      trainmaster cancel llama-trial --wait
    """
    with connect(home, server) as jobs:
        if (found := jobs.find_set(job)) is not None:
            sweep.cancel(jobs, found, job, wait=wait, json=json)
            return
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
