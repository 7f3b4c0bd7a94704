"""Drive jobs from a short-lived command: a reconciler in a thread, which stands by where a server drives already."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli._home import find_storage, open_storage

if TYPE_CHECKING:
    from trainmaster.store.database import Database


@contextlib.contextmanager
def driving(db: Database, home: Path, job_id: str) -> Iterator[None]:
    """This job and those of the home that have begun go on while the block runs; no other is taken from the queue."""
    from trainmaster.control import reconcile
    from trainmaster.pages.parts import node_journal

    storage = open_storage(find_storage(home), home)  # where a server of this home keeps things too
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    checks = functools.partial(node_journal.read_verdicts, home)
    driven = reconcile.run(db, home, stop=stop, storage=storage, begins=job_id, checks=checks)
    thread = threading.Thread(target=lambda: loop.run_until_complete(driven), daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=10)
        if not thread.is_alive():
            loop.close()
