"""Requests about jobs, for every verb: answered by the home folder or by a server.

A verb opens `connect(home, server)` and calls the same methods in both cases. `home.py` answers from the
database, the targets and the storage of a home folder; `server.py` from the REST API of a server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli import _console

if TYPE_CHECKING:
    from trainmaster.api.jobs import JobLine
    from trainmaster.cli._jobs.home import HomeJobs
    from trainmaster.cli._jobs.server import ServerJobs

    Jobs = HomeJobs | ServerJobs  # a job id is the whole id; `find` turns a word of the user into one

_EVERY_S = 0.5


@contextlib.contextmanager
def connect(
    home: Path | None, server: str | None, *, storage: str | None = None, reads: bool = False
) -> Iterator[Jobs]:
    """The server where one is given, else the home folder. `reads`: say where the home was not there yet."""
    if server:
        from trainmaster.cli._jobs.server import ServerJobs
        from trainmaster.cli._server import explain_missing_token, open_client

        with open_client(server, home) as client, explain_missing_token():
            yield ServerJobs(client)
        return
    from trainmaster.cli._home import is_new, open_home
    from trainmaster.cli._jobs.home import HomeJobs

    new = reads and is_new(home)
    folder, db = open_home(home)
    if new:  # of a mistyped --home an empty answer would be all
        _console.note(f"new, empty home {_console.plain(str(folder))}; name another one with --home")
    try:
        yield HomeJobs(folder, db, storage=storage)
    finally:
        db.close()


def warn_undriven(jobs: Jobs) -> bool:
    """Say on standard error that nothing drives the jobs, and since when their state is unknown; whether it did."""
    if jobs.is_driven():
        return False
    since = jobs.last_driven()
    known = f"open jobs are shown as of {since.astimezone():%Y-%m-%d %H:%M:%S}" if since else "no job was started yet"
    _console.note(f"no server or worker runs on this home folder: {known}; start one with: trainmaster serve")
    return True


def wait(jobs: Jobs, job_id: str, *, tick: Callable[[], None] = lambda: None) -> JobLine:
    """Wait for the end of a job; `tick` is called between two polls."""
    while not (line := jobs.line(job_id)).final:
        tick()
        time.sleep(_EVERY_S)
    return line
