"""`trainmaster remedy`: take the nodes that failed a check out of service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console, _remedy
from trainmaster.cli._home import HomeOption, locate
from trainmaster.cluster import journal
from trainmaster.core.errors import TargetError

if TYPE_CHECKING:
    from trainmaster.cluster.remedy import Drain, Selection
    from trainmaster.cluster.schedulers import Scheduler


def remedy(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="What `trainmaster check --out DIR` wrote.")],
    through: Annotated[str, typer.Option("--with", metavar="SCHEDULER", help="slurm or kubernetes.")],
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

      trainmaster remedy evidence/ --with slurm

      trainmaster remedy evidence/ --with kubernetes --max-nodes 2 --yes
    """
    from trainmaster.cluster import schedulers
    from trainmaster.cluster.remedy import select, still_out

    scheduler, place = schedulers.load(through), locate(home)
    out = [one.node for one in still_out(journal.read(place / journal.REMEDIES))]
    plan = select(_remedy.load(bundle), limit=max_nodes, include_unknown=include_silent, already_out=out)
    if as_json:
        commands = {one.node: scheduler.drain(one.node, one.reason) for one in plan.drains}
        _console.as_json({"plan": plan, "commands": commands, "done": bool(yes and not plan.refusal)})
    else:
        _show(plan, scheduler)
    if plan.refusal is not None:
        _console.err.print(f"[bold red]refused[/] {_remedy.plain(plan.refusal)}", soft_wrap=True)
        raise typer.Exit(1)
    if not plan.drains:
        return
    if not yes:
        _console.note("dry run: nothing was done; --yes does it")
        return
    faults = [fault for one in plan.drains if (fault := _drain(one, scheduler, place, through)) is not None]
    for fault in faults:
        _console.err.print(f"[bold red]not done[/] {_remedy.plain(fault)}", soft_wrap=True)
    raise typer.Exit(1 if faults else 0)


def _show(plan: Selection, scheduler: Scheduler) -> None:
    for node, why in plan.left:
        _console.note(f"left alone  {_remedy.plain(node)}: {_remedy.plain(why)}")
    if not plan.drains:
        _console.note("no node is to be drained")
    for one in plan.drains:
        _remedy.show(scheduler.drain(one.node, one.reason))


def _drain(one: Drain, scheduler: Scheduler, home: Path, through: str) -> str | None:
    """Take one node out; what went wrong, or None."""
    try:
        now = _remedy.look(scheduler, one.node)
        if now.out and not now.ours:
            return f"{one.node} is out already, and not by us ({now.reason or 'no reason told'}); it stays as it is"
        # Before it is done: should we die in between, the node is out and known to be.
        _remedy.note(home, "drain", one.node, checks=list(one.checks), reason=one.reason, through=through)
        for command in scheduler.drain(one.node, one.reason):
            _remedy.run(command)
        if not _remedy.look(scheduler, one.node).ours:
            return f"{one.node} was drained, and {through} does not show it"
    except TargetError as wrong:
        try:
            if not _remedy.look(scheduler, one.node).out:
                _remedy.note(home, "undo", one.node)
        except TargetError:
            pass  # nobody can tell: it stays in the journal as out, which a later run counts
        return f"{one.node}: {wrong}"
    _console.note(f"drained  {_remedy.plain(one.node)}")
    return None
