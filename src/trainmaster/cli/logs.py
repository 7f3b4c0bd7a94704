"""`trainmaster logs`: the output of a rank or of the agent."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.core.plan import AGENT_LOG, rank_log


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
    stream = AGENT_LOG if agent else rank_log(rank)
    with connect(home, server) as jobs:
        for piece in jobs.log(jobs.find(job), stream, attempt=attempt, follow=follow):
            sys.stdout.buffer.write(_console.log_bytes(piece))
            sys.stdout.buffer.flush()
