"""`trainmaster resume`: go on with a job that is over."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect, sweep
from trainmaster.cli._server import ServerOption
from trainmaster.cli.jobs.submit import follow_to_end
from trainmaster.core.errors import UsageError


def resume(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name; or a set with a schedule.")],
    values: Annotated[list[str] | None, typer.Argument(help="Values to put over its spec's: key.path=value.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Run it again from the beginning instead, as a run of its own.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Drive and watch the new job to its end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the new job as JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Go on with a job that failed, was cancelled, or should train for longer: a new job, from its last checkpoint.

    A job that still runs is refused: two runs must not write the same checkpoints. One that has saved no checkpoint
    is refused too; --again runs it from the beginning. Both take the files that were uploaded then: to go on with a
    mended script, `trainmaster submit job.yaml resume_from=JOB`.

    A schedule that was paused goes on with its next time from now; times during the pause are not made up for.

    [bold]Examples[/]

      trainmaster resume 3f2a

      trainmaster resume llama-trial train.steps=20000 --follow

      trainmaster resume llama-trial limits.max_cost=500

      trainmaster resume --again 3f2a

      trainmaster resume nightly   (a schedule that `trainmaster pause` has paused)
    """
    with connect(home, server) as jobs:
        if (found := jobs.find_set(job)) is not None:
            if values or again or follow:
                raise UsageError(f"{job!r} is a set of runs: --again, --follow and values are for a job")
            sweep.change_schedule(jobs, found, job, paused=False, json=json)
            return
        act = jobs.rerun if again else jobs.resume
        made = act(jobs.find(job), values or ())
        if json:
            fields = ("id", "name", "project", "status", "stage", "reason")
            _console.as_json({name: getattr(made, name) for name in fields})
        else:
            _console.out.print(f"{made.name} {'runs again' if again else 'continues'} as {made.id}")
            if made.note:
                _console.note(_console.plain(made.note))
        if follow:
            raise typer.Exit(follow_to_end(jobs, made.id))
        if not json and not jobs.is_driven():
            _console.note("no server works on this home folder yet; start one with: trainmaster serve")
