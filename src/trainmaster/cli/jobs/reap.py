"""`trainmaster reap`: what runs or is rented and belongs to no live job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.cli._documents.hosts_file import ask
from trainmaster.cli._home import HomeOption, locate, needing, open_home
from trainmaster.core.errors import TargetError, UsageError

if TYPE_CHECKING:
    from trainmaster.control.reap import Leftover
    from trainmaster.store.database import Database


def reap(
    on: Annotated[list[str] | None, typer.Option("--on", help="Targets to look at.", show_default="local")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="End it, by force.")] = False,
    no_database: Annotated[
        bool, typer.Option("--no-database", help="Ask the targets alone: names ALL that they run for this home.")
    ] = False,
    any_home: Annotated[
        bool, typer.Option("--any-home", help="With --no-database: rented machines of every home folder count as ours.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """List what no live job owns, and end it with --yes. Exit code 1 if something is left.

    Folders, checkpoints and logs are never removed. What belongs to another home is shown and left alone. Of rented
    machines type, state and price are shown; those that Trainmaster did not rent are never touched.

    [bold]Examples[/]

      trainmaster reap

      trainmaster reap --yes --json

      trainmaster reap --no-database --on local --yes

      trainmaster reap --on lambda

      trainmaster reap --no-database --any-home --on lambda --yes     (with the API key alone)
    """
    with needing("the control plane"):
        from trainmaster import targets
        from trainmaster.control import reap as control_reap
    if any_home and not no_database:
        raise UsageError("--any-home goes with --no-database: a database names the machines that are ours")
    on = on or [name for name in targets.names() if targets.traits(name).here]
    for word in on:
        if (stated := targets.find_traits(word)) is not None:
            stated.require_file(word)
    folder, db = _open(home, no_database=no_database)
    leftovers = ask(control_reap.find(db, folder, on, any_home=any_home))
    ended: dict[str, str] = {}
    for left in leftovers:
        if yes and left.ours:
            try:
                ask(control_reap.end(db, left))
                ended[left.attempt] = "ended"
            except TargetError as error:
                ended[left.attempt] = f"not ended: {error}"
    if ended:  # ended is what the target no longer lists, not what it promised
        again = {left.attempt for left in ask(control_reap.find(db, folder, on, any_home=any_home))}
        ended |= {attempt: "still there" for attempt in again if ended.get(attempt) == "ended"}
    still = [left for left in leftovers if left.ours and ended.get(left.attempt) != "ended"]
    if json:
        plain = [
            {"attempt": left.attempt, "target": left.target, "what": left.what, "why": left.why, "ours": left.ours,
             "result": ended.get(left.attempt)}
            for left in leftovers
        ]  # fmt: skip
        _console.as_json({"leftovers": plain, "left": len(still)})
    else:
        _print(leftovers, ended)
        if still and not yes:
            _console.note("--yes ends them")
    raise typer.Exit(1 if still else 0)


def _open(home: Path | None, *, no_database: bool) -> tuple[Path, Database | None]:
    folder = locate(home)
    if no_database:
        return folder, None
    if not folder.exists():
        raise UsageError(f"{folder} is not there; give --home, or ask the targets alone with --no-database")
    return open_home(home)


def _print(leftovers: list[Leftover], ended: dict[str, str]) -> None:
    if not leftovers:
        _console.out.print("nothing is left over")
        return
    table = _console.table("attempt", "target", "what", "why", "")
    for left in leftovers:
        table.add_row(left.attempt, left.target, escape(left.what), left.why, escape(ended.get(left.attempt, "")))
    _console.out.print(table)
