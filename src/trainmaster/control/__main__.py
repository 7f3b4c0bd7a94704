"""`python -m trainmaster.control HOME`: the reconciler alone, in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from trainmaster.control.reconcile import run
from trainmaster.store import Database

DATABASE_FILE = "trainmaster.db"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.control", description=__doc__)
    parser.add_argument("home", type=Path, help="the folder with trainmaster.db and the jobs")
    parser.add_argument("--tick-s", type=float, default=0.5, help="seconds between two looks at the jobs")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    options.home.mkdir(parents=True, exist_ok=True)
    db = Database.open(options.home / DATABASE_FILE)
    try:
        asyncio.run(_until_told(db, options.home, tick_s=options.tick_s))
    finally:
        db.close()


async def _until_told(db: Database, home: Path, *, tick_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run(db, home, stop=stop, tick_s=tick_s)


if __name__ == "__main__":
    main()
