"""A control plane that runs beside a test, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainmaster.control import reconcile
from trainmaster.storage import Store
from trainmaster.store.database import Database


@contextlib.contextmanager
def driven(db: Database, home: Path, store: Store, **more: Any) -> Iterator[None]:
    """One that lives through all of what is done inside."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    running = reconcile.run(db, home, stop=stop, tick_s=0.05, storage=store, **more)
    thread = threading.Thread(target=lambda: loop.run_until_complete(running))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def wait(done: Callable[[], bool]) -> None:
    """pytest's own timeout ends what never is. Asked ever more rarely: what it waits for has the same two cores."""
    rest_s = 0.02
    while not done():
        time.sleep(rest_s)
        rest_s = min(0.2, rest_s * 1.2)
