"""`trainmaster rebuild`: derive records of jobs again from their events."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, open_home


def rebuild(
    job: Annotated[list[str] | None, typer.Argument(help="Ids of jobs.", show_default="all")] = None,
    home: HomeOption = None,
) -> None:
    """Derive iterations, epochs, evaluations and checks again from the stored events.

    Events are not changed. Use it after an upgrade from a database that held events and no records.

    [bold]Examples[/]

      trainmaster rebuild

      trainmaster rebuild 0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10
    """
    _folder, db = open_home(home)
    from trainmaster.control import maintain
    from trainmaster.core.errors import JobMissing
    from trainmaster.store import jobs

    try:
        for job_id in job or jobs.list_ids(db):
            if jobs.find_job(db, job_id) is None:
                raise JobMissing(f"there is no job {job_id}; `trainmaster jobs` lists them")
            _console.out.print(f"{job_id}: {maintain.rebuild(db, job_id)} events read")
    finally:
        db.close()
