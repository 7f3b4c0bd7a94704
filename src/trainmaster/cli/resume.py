"""`trainmaster resume`: go on with a job that is over."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainmaster.cli import _console, _server, _yaml_file
from trainmaster.cli._home import HomeOption, find, open_home
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError
from trainmaster.core.schema import to_plain
from trainmaster.core.spec import parse_spec


def resume(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    values: Annotated[list[str] | None, typer.Argument(help="Values to put over its spec's: key.path=value.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the new job as JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Go on with a job that failed, was cancelled, or should train for longer: a new job, from its last checkpoint.

    A job that still runs is refused: two runs must not write the same checkpoints.

    [bold]Examples[/]

      trainmaster resume 3f2a

      trainmaster resume llama-trial train.steps=20000

      trainmaster resume llama-trial limits.max_cost=500
    """
    if server:
        if values:
            raise UsageError("a server does not give out whole specs; submit yours again, with resume_from=JOB-ID")
        with _server.connect(server) as client:
            _tell(client.resume(_server.find(client, job)), json=json)
        return
    _, db = open_home(home)
    from trainmaster import control

    earlier = find(db, job)
    spec = parse_spec(_yaml_file.override(to_plain(earlier.spec), [*(values or []), f"resume_from={earlier.id}"]))
    _tell(control.submit(db, spec), json=json)


def _tell(row: Any, *, json: bool) -> None:
    if json:
        _console.as_json({name: getattr(row, name) for name in ("id", "name", "project", "status", "stage", "reason")})
    else:
        _console.out.print(f"{row.name} goes on as {row.id}")
