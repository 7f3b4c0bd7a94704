"""`trainmaster readmit`: give nodes that passed a newer check back to the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, locate
from trainmaster.cli._views import remedy_text
from trainmaster.core.errors import TargetError


def readmit(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="A check made after the nodes were taken out.")],
    through: Annotated[str, typer.Option("--with", "--on", metavar="TARGET", help="Scheduler: {targets:remedy}.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without this the plan is printed and nothing is.")] = False,
    allow_warn: Annotated[bool, typer.Option("--allow-warn", help="Also nodes that pass with warnings.")] = False,
    home: HomeOption = None,
) -> None:
    """Resume nodes that `remedy`, or a failed pre-flight, drained and that pass again; dry run unless told --yes.

    A node comes back only if a run that began after it was taken out says PASS of it, and measured again each check
    that put it out. Ends with 0 if every node that is out came back, 1 if one stays.

    [bold]Examples[/]

      trainmaster check --on ssh:hosts.yaml --out retest/

      trainmaster readmit retest/ --with slurm --yes
    """
    from trainmaster.cluster.health import journal
    from trainmaster.cluster.remedy import drain, schedulers
    from trainmaster.cluster.remedy.remedy import readmit as select
    from trainmaster.cluster.remedy.remedy import still_out

    scheduler, folder = schedulers.load(through), locate(home)
    out = still_out(journal.read(folder / journal.REMEDIES))
    try:
        out += drain.list_out(scheduler, besides=out)
    except TargetError as error:
        _console.note(f"only nodes of this journal are considered: {remedy_text.plain(str(error))}")
    back, stay = select(remedy_text.load_whole(bundle), out, allow_warn=allow_warn)
    for node, why in stay:
        _console.note(f"stays out  {remedy_text.plain(node)}: {remedy_text.plain(why)}")
    if not out:
        _console.note("no node is out by `trainmaster remedy`; there is nothing to do")
    for node in back:
        remedy_text.show(scheduler.resume(node))
    if not yes:
        if back:
            _console.note("dry run: nothing was done; --yes does it")
        raise typer.Exit(1 if stay else 0)
    failed = remedy_text.tell("resumed", ((node, drain.resume(node, scheduler, folder, through)) for node in back))
    raise typer.Exit(1 if failed or stay else 0)
