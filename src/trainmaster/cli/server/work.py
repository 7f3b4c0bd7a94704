"""`trainmaster work`: drive the jobs without serving anything."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, StorageOption, open_home, open_storage


def work(
    home: HomeOption = None,
    storage: StorageOption = None,
    tick_s: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at the jobs.")] = 0.5,
) -> None:
    """Drive the jobs of a database, without an API: several workers may share one PostgreSQL.

    A worker that dies loses nothing; another takes its jobs over when their leases run out.

    [bold]Examples[/]

      trainmaster work

      trainmaster work --home /data/trainmaster --storage s3://bucket/trainmaster
    """
    folder, db = open_home(home)
    from trainmaster.control.__main__ import drive

    kept = open_storage(storage, folder)
    _console.note(f"driving the jobs of {folder}; Ctrl-C ends this, the jobs go on")
    try:
        asyncio.run(drive(db, folder, kept, tick_s=tick_s))
    finally:
        db.close()
