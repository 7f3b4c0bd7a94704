"""`trainmaster backup`: a consistent copy of the home folder, while a server runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, open_home


def backup(folder: Annotated[Path, typer.Argument(help="New folder for the copy.")], home: HomeOption = None) -> None:
    """Copy the database, the keys and the stored objects of a home folder.

    A server may run meanwhile. Checkpoints in job folders are not copied. With PostgreSQL, dump the database with
    pg_dump beside it.

    [bold]Examples[/]

      trainmaster backup /backups/trainmaster-2026-03-01
    """
    place, db = open_home(home)
    from trainmaster.control import maintain

    try:
        copied = maintain.back_up(db, place, folder.absolute())
    finally:
        db.close()
    _console.out.print(f"copied to {folder}: {', '.join(copied)}")
    if maintain.DATABASE_FILE not in copied:
        _console.note("the database is PostgreSQL: dump it with pg_dump")
