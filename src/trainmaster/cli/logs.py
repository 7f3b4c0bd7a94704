"""`trainmaster logs`: what a rank or the agent printed."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console, _server
from trainmaster.cli._home import HomeOption, find, open_home
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError
from trainmaster.core.plan import AGENT_LOG, rank_log

if TYPE_CHECKING:
    from trainmaster.store.rows import AttemptRow

_CHUNK = 1 << 18


def logs(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    rank: Annotated[int, typer.Option(min=0, help="Which rank.")] = 0,
    agent: Annotated[bool, typer.Option("--agent", help="The agent's own log instead of a rank's.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which attempt; the last one if not stated.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Print a log, byte for byte.

    [bold]Examples[/]

      trainmaster logs 3f2a -f

      trainmaster logs 3f2a --rank 1 --attempt 2
    """
    stream, offset = AGENT_LOG if agent else rank_log(rank), 0
    if server:
        _print(server, job, stream, attempt, follow=follow)
        return
    _, db = open_home(home)
    from trainmaster import targets
    from trainmaster.store import jobs
    from trainmaster.store.attempts import list_attempts

    row = find(db, job)
    target = targets.load(row.target)
    chosen = _choose(list_attempts(db, row.id), attempt)
    while True:
        now = jobs.find_job(db, row.id)
        over = now is None or now.status.final
        while chunk := asyncio.run(target.read(chosen.handle or {}, stream, offset=offset, limit=_CHUNK)):
            sys.stdout.buffer.write(_console.log_bytes(chunk))
            sys.stdout.buffer.flush()
            offset += len(chunk)
        if not follow or over:
            return
        time.sleep(0.5)


def _print(server: str, word: str, stream: str, attempt: int | None, *, follow: bool) -> None:
    with _server.connect(server) as client:
        job_id = _server.find(client, word)
        if follow:
            for piece in client.follow_logs(job_id, stream, attempt=attempt):
                sys.stdout.buffer.write(_console.log_bytes(piece))
                sys.stdout.buffer.flush()
            return
        offset = 0
        while piece := client.logs(job_id, stream, attempt=attempt, offset=offset):
            sys.stdout.buffer.write(_console.log_bytes(piece))
            offset += len(piece)
        sys.stdout.buffer.flush()


def _choose(attempts: list[AttemptRow], number: int | None) -> AttemptRow:
    placed = [attempt for attempt in attempts if attempt.handle is not None]
    if not placed:
        raise UsageError("the job has not started yet; there is no log")
    found = [attempt for attempt in placed if number in (None, attempt.number)]
    if not found:
        raise UsageError(f"--attempt {number}: there are {len(placed)}")
    return found[-1]
