"""`trainmaster work`: drive the jobs without serving anything."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, StorageOption, open_home, open_storage

if TYPE_CHECKING:
    from trainmaster.storage import Store
    from trainmaster.store.database import Database


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
    kept = open_storage(storage, folder)
    _console.note(f"driving the jobs of {folder}; Ctrl-C ends this, the jobs go on")
    try:
        asyncio.run(_until_told(db, folder, kept, tick_s))
    finally:
        db.close()


async def _until_told(db: Database, home: Path, storage: Store, tick_s: float) -> None:
    from trainmaster.control import budget, maintain, reconcile
    from trainmaster.control.notify import outbox

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # One that dies takes the others with it: a worker that counts no money must not go on spending it.
    async with asyncio.TaskGroup() as group:
        group.create_task(reconcile.run(db, home, stop=stop, tick_s=tick_s, storage=storage))
        group.create_task(budget.run(db, stop=stop, home=home))
        group.create_task(outbox.run(db, home, stop=stop))
        group.create_task(maintain.run(db, home, storage, stop=stop))
