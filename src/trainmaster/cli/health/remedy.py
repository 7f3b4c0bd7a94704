"""`trainmaster remedy`: take the nodes that failed a check out of service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, locate
from trainmaster.cli._views import remedy_text

if TYPE_CHECKING:
    from trainmaster.cluster.remedy.remedy import Selection
    from trainmaster.targets import Scheduler


def remedy(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="What `trainmaster check --out DIR` wrote.")],
    through: Annotated[str, typer.Option("--with", "--on", metavar="TARGET", help="Scheduler: {targets:remedy}.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without this the plan is printed and nothing is.")] = False,
    max_nodes: Annotated[
        int | None, typer.Option(min=0, help="Most nodes that may be out.", show_default="a tenth, at least 1")
    ] = None,
    include_silent: Annotated[
        bool, typer.Option("--include-silent", help="Also nodes that gave no answer or could not be measured.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Drain the nodes that failed a check; dry run unless told --yes.

    Only nodes that FAILED are touched. One of which nothing is known is named and left alone: unknown is not bad. If
    more nodes than the limit would be out, none is touched. A node that somebody else took out is left as it is.
    Ends with 0 if all was done or there was nothing to do, 1 if something was refused.

    [bold]Examples[/]

      trainmaster remedy evidence/ --on slurm:cluster.yaml

      trainmaster remedy evidence/ --with kubernetes --max-nodes 2 --yes
    """
    from trainmaster.cluster.health import journal
    from trainmaster.cluster.remedy import drain, schedulers
    from trainmaster.cluster.remedy.remedy import select, still_out

    scheduler, folder = schedulers.load(through), locate(home)
    out = [entry.node for entry in still_out(journal.read(folder / journal.REMEDIES))]
    plan = select(remedy_text.load_whole(bundle), limit=max_nodes, include_unknown=include_silent, already_out=out)
    if as_json:
        commands = {planned.node: scheduler.drain(planned.node, planned.reason) for planned in plan.drains}
        _console.as_json({"plan": plan, "commands": commands, "done": bool(yes and not plan.refusal)})
    else:
        _show(plan, scheduler)
    if plan.refusal is not None:
        _console.err.print(f"[bold red]refused[/] {remedy_text.plain(plan.refusal)}", soft_wrap=True)
        raise typer.Exit(1)
    if not plan.drains:
        return
    if not yes:
        _console.note("dry run: nothing was done; --yes does it")
        return
    outcomes = ((planned.node, drain.drain(planned, scheduler, folder, through)) for planned in plan.drains)
    raise typer.Exit(1 if remedy_text.tell("drained", outcomes) else 0)


def _show(plan: Selection, scheduler: Scheduler) -> None:
    for node, why in plan.left:
        _console.note(f"left alone  {remedy_text.plain(node)}: {remedy_text.plain(why)}")
    if not plan.drains:
        _console.note("no node is to be drained")
    for planned in plan.drains:
        remedy_text.show(scheduler.drain(planned.node, planned.reason))
