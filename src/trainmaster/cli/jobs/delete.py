"""`trainmaster delete`: final jobs with their rows, folders and stored objects."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, StorageOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError


def delete(
    job: Annotated[list[str], typer.Argument(help="Ids of jobs, unique beginnings of them, or names.")],
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    home: HomeOption = None,
    storage: StorageOption = None,
    server: ServerOption = None,
) -> None:
    """Delete final jobs: rows, events, logs, outputs and checkpoints. Their cost no longer counts in budgets.

    A job that runs is refused: cancel it and wait for its end. On a server, users delete jobs of their project.

    TRAINMASTER_RETAIN_DAYS lets a server delete jobs that ended longer ago by itself.

    [bold]Examples[/]

      trainmaster delete 0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10 --yes
    """
    if not yes and not sys.stdin.isatty():
        raise UsageError("nobody can be asked here: --yes deletes without asking")
    if not yes:
        typer.confirm(
            f"delete {len(job)} {'job with everything it' if len(job) == 1 else 'jobs with everything they'} left?",
            abort=True,
        )
    with connect(home, server, storage=storage) as jobs:
        for word in job:
            job_id = jobs.find(word)
            jobs.delete(job_id)
            _console.out.print(f"deleted {job_id}")
