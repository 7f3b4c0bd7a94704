"""`trainmaster cancel`: ask a job to save and stop."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli import _say
from trainmaster.cli._home import HomeOption, find, open_home


def cancel(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Return when everything it held is given back.")] = False,
    home: HomeOption = None,
) -> None:
    """Cancel a job: it is asked to save, killed after its grace, and all it held is given back.

    [bold]Examples[/]

      trainmaster cancel 3f2a

      trainmaster cancel llama-trial --wait
    """
    folder, db = open_home(home)
    from trainmaster import control

    row = control.cancel(db, find(db, job).id)
    if wait:
        from trainmaster.cli._drive import driving
        from trainmaster.cli._follow import follow

        with driving(db, folder):
            row = follow(db, row.id)
    _say.out.print(f"{row.name} {row.id}: {_say.paint(row.status)}")
