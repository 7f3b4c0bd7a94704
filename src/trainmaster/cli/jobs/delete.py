"""`trainmaster delete`: final jobs with their rows, folders and stored objects."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, StorageOption, find_storage, open_home, open_storage


def delete(
    job: Annotated[list[str], typer.Argument(help="Ids of jobs.")],
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    home: HomeOption = None,
    storage: StorageOption = None,
) -> None:
    """Delete final jobs: rows, events, logs, outputs and checkpoints. Their cost no longer counts in budgets.

    TRAINMASTER_RETAIN_DAYS lets a server delete jobs that ended longer ago by itself.

    [bold]Examples[/]

      trainmaster delete 0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10 --yes
    """
    if not yes:
        typer.confirm(f"delete {len(job)} jobs with everything they left?", abort=True)
    place, db = open_home(home)
    from trainmaster.control import maintain
    from trainmaster.control.submit import LOCAL

    try:
        for job_id in job:
            maintain.delete_job(db, open_storage(storage or find_storage(place), place), place, job_id, by=LOCAL)
            _console.out.print(f"deleted {job_id}")
    finally:
        db.close()
