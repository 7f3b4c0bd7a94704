"""`trainmaster pause`: a schedule begins no run until it is resumed."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect, sweep
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError


def pause(
    schedule: Annotated[str, typer.Argument(help="Set with a `schedule:`, by its name, its id or a beginning of it.")],
    json: Annotated[bool, typer.Option("--json", help="Print the set as JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Pause a schedule: no run of it begins until `trainmaster resume`. Runs that have begun are not stopped.

    [bold]Examples[/]

      trainmaster pause nightly

      trainmaster resume nightly
    """
    with connect(home, server) as jobs:
        found = jobs.find_set(schedule)
        if found is None:
            raise UsageError(f"there is no schedule {schedule!r}; `trainmaster jobs` lists them")
        sweep.change_schedule(jobs, found, schedule, paused=True, json=json)
