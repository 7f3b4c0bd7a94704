"""`trainmaster backup`: a consistent copy of the home folder, while a server runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, open_home


def backup(
    folder: Annotated[Path, typer.Argument(help="New folder for the copy.")],
    home: HomeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Copy a home folder: the database, keys, stored objects, and the history of checks and remedies.

    A server may run meanwhile. Checkpoints in job folders are not copied; what is left out is said at the end. With
    PostgreSQL, dump the database with pg_dump beside it.

    [bold]Examples[/]

      trainmaster backup /backups/trainmaster-2026-03-01
    """
    place, db = open_home(home)
    from trainmaster.control import maintain
    from trainmaster.core.schema import to_plain
    from trainmaster.report import formats

    begun = time.monotonic()
    try:
        made = maintain.back_up(db, place, folder.absolute())
    finally:
        db.close()
    took_s = time.monotonic() - begun
    if as_json:
        _console.as_json({"folder": str(folder.absolute()), **to_plain(made), "took_s": round(took_s, 3)})
        return
    size = formats.size(made.size_bytes)
    _console.out.print(f"copied to {folder}: {', '.join(made.copied)} ({size} in {took_s:.1f} s)", soft_wrap=True)
    for name, reason in made.left_out.items():
        _console.out.print(f"left out: {name} ({reason})", soft_wrap=True)
    if maintain.DATABASE_FILE not in made.copied:
        _console.note("the database is PostgreSQL: dump it with pg_dump")
