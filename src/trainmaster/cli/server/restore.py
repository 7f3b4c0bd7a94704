"""`trainmaster restore`: a home folder from a backup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, locate, needing


def restore(
    folder: Annotated[Path, typer.Argument(help="Folder that `trainmaster backup` wrote.")], home: HomeOption = None
) -> None:
    """Copy a backup into a home folder that has no database yet.

    [bold]Examples[/]

      trainmaster restore /backups/trainmaster-2026-03-01 --home /data/trainmaster
    """
    with needing("the control plane"):
        from trainmaster.control import maintain
    place = locate(home)
    copied = maintain.restore(folder.absolute(), place)
    _console.out.print(f"restored to {place}: {', '.join(copied)}")
