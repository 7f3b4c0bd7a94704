"""`python -m trainmaster.control HOME`: reconciler, budgets and news without the web, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from trainmaster.control import budget, maintain
from trainmaster.control.notify import outbox
from trainmaster.control.reconcile import STORAGE_FOLDER, run
from trainmaster.storage import Store, open_store
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

DATABASE_FILE = "trainmaster.db"
DATABASE_VARIABLE = "TRAINMASTER_DATABASE"  # a URL may hold a password: it is no argument that others can see


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.control", description=__doc__)
    parser.add_argument("home", type=Path, help="the folder with trainmaster.db and the jobs")
    parser.add_argument("--tick-s", type=float, default=0.5, help="seconds between two looks at the jobs")
    parser.add_argument("--storage", help="folder or URL for what jobs leave; not stated: HOME/storage")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    options.home.mkdir(parents=True, exist_ok=True)
    db = open_database(os.environ.get(DATABASE_VARIABLE) or options.home / DATABASE_FILE)
    try:
        storage = open_store(options.storage or options.home / STORAGE_FOLDER)
        asyncio.run(drive(db, options.home, storage, tick_s=options.tick_s))
    finally:
        db.close()


async def drive(db: Database, home: Path, storage: Store, *, tick_s: float) -> None:
    """Drive the jobs until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # One that dies takes the others with it: a worker that counts no money must not go on spending it.
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(db, home, stop=stop, tick_s=tick_s, storage=storage))
        tasks.create_task(budget.run(db, stop=stop, home=home))
        tasks.create_task(outbox.run(db, home, stop=stop))
        tasks.create_task(maintain.run(db, home, storage, stop=stop))


if __name__ == "__main__":
    main()
