"""Drive jobs from a short-lived command: a reconciler in a thread, which stands by where a server drives already."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.store import Database


@contextlib.contextmanager
def driving(db: Database, home: Path) -> Iterator[None]:
    """Jobs of this home go on while the block runs."""
    from trainmaster import control

    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(control.run(db, home, stop=stop)), daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=10)
        if not thread.is_alive():
            loop.close()
