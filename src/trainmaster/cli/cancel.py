"""`trainmaster cancel`: ask a job to save and stop."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainmaster.cli import _console, _server
from trainmaster.cli._home import HomeOption, find, open_home
from trainmaster.cli._server import ServerOption


def cancel(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Return when everything it held is given back.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Cancel a job: it is asked to save, killed after its grace, and all it held is given back.

    [bold]Examples[/]

      trainmaster cancel 3f2a

      trainmaster cancel llama-trial --wait
    """
    if server:
        with _server.connect(server) as client:
            asked = client.cancel(_server.find(client, job))
            ended = client.wait(asked.id) if wait else asked
        _tell(ended, json=json)
        return
    folder, db = open_home(home)
    from trainmaster import control

    row = control.cancel(db, find(db, job).id)
    if wait:
        from trainmaster.cli._follow import follow
        from trainmaster.cli._inline_reconciler import driving

        with driving(db, folder):
            row = follow(db, row.id)
    _tell(row, json=json)


def _tell(row: Any, *, json: bool) -> None:
    if json:
        _console.as_json({name: getattr(row, name) for name in ("id", "name", "project", "status", "stage", "reason")})
    else:
        _console.out.print(f"{row.name} {row.id}: {_console.paint(row.status)}")
