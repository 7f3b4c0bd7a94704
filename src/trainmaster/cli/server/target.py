"""`trainmaster target`: make targets known to a server, and grant them to projects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainmaster.api.targets import KnownTarget

target = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Make targets known, and grant them to projects.

    Tokens of projects submit only to targets that were granted to theirs, and their jobs run there as an account of
    the project's own: never as the server, never as another project. For admins of the server.

    [bold]Examples[/]

      trainmaster target grant local --project lab --user tm-lab

      trainmaster target add gpus --as ssh:/etc/trainmaster/hosts.yaml

      trainmaster target grant gpus --project lab --user tm-lab

      trainmaster target list
    """,
)
Name = Annotated[str, typer.Argument(help="What specs write in `target:` and `--on`.")]
Project = Annotated[str, typer.Option("--project", help="Project whose tokens may submit there.")]
User = Annotated[
    str | None,
    typer.Option(
        "--user",
        help="Account of the project's jobs there: a Unix user; on Kubernetes NAMESPACE or NAMESPACE/SERVICE-ACCOUNT.",
        show_default="the one of the settings file",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@target.command("add")
def add(
    name: Name,
    word: Annotated[str, typer.Option("--as", help="Kind and settings file, as ssh:hosts.yaml.")],
    project: Annotated[list[str] | None, typer.Option("--project", help="Also grant it to this project.")] = None,
    user: User = None,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Make a target known under a name. The file stays where it is; a server needs its whole path there.

    [bold]Examples[/]

      trainmaster target add gpus --as ssh:hosts.yaml

      trainmaster target add cluster --as slurm:/etc/trainmaster/cluster.yaml --project lab --user tm-lab

      trainmaster target add aws --as sagemaker:/etc/trainmaster/account.yaml --project lab
    """
    from trainmaster import targets

    if not server:
        word = targets.traits(word).make_absolute(word, Path.cwd())
    if user is not None and len(project or []) != 1:
        raise UsageError("--user: the account of one project; state one --project, and grant the others by themselves")
    with connect(home, server) as jobs:
        jobs.add_target(name, word)
        for each in project or ():
            jobs.grant_target(name, each, user=user)
    _console.out.print(f"{_console.plain(name)}: known; specs write target: {_console.plain(name)}")


@target.command("list")
def list_(json: Json = False, home: HomeOption = None, server: ServerOption = None) -> None:
    """List targets that are known or granted, and as which account each project uses them."""
    with connect(home, server) as jobs:
        rows = jobs.targets()
    _print(rows, json=json)


@target.command("show")
def show(name: Name, json: Json = False, home: HomeOption = None, server: ServerOption = None) -> None:
    """Show one target. What its settings file holds is not shown."""
    from trainmaster import targets

    with connect(home, server) as jobs:
        rows = [row for row in jobs.targets() if row.name == name]
    if not rows and (stated := targets.find_traits(name)) is not None and not json:
        _console.out.print(
            f"{_console.plain(name)}: {stated.title}. Built in and granted to no project: its jobs are yours alone "
            "(`trainmaster target grant --help`)"
        )
        return
    if not rows:
        raise UsageError(f"no target {name!r:.80} is known or granted; `trainmaster target list` lists them")
    _print(rows, json=json)


@target.command("grant")
def grant(
    name: Name, project: Project, user: User = None, home: HomeOption = None, server: ServerOption = None
) -> None:
    """Let the jobs of a project run on a target, as an account of its own.

    [bold]Examples[/]

      trainmaster target grant local --project lab --user tm-lab

      trainmaster target grant kubernetes --project lab --user lab-jobs/trainer

      trainmaster target grant lambda --project lab
    """
    with connect(home, server) as jobs:
        jobs.grant_target(name, project, user=user)
    _console.out.print(f"{_console.plain(name)}: granted to {_console.plain(project)}")


@target.command("revoke")
def revoke(name: Name, project: Project, home: HomeOption = None, server: ServerOption = None) -> None:
    """Take a target away from a project. Its jobs that run go on."""
    with connect(home, server) as jobs:
        jobs.revoke_target(name, project)
    _console.out.print(f"{_console.plain(name)}: no longer granted to {_console.plain(project)}")


@target.command("remove")
def remove(name: Name, home: HomeOption = None, server: ServerOption = None) -> None:
    """Forget a target, and to whom it was granted. Refused while open jobs run there."""
    with connect(home, server) as jobs:
        jobs.remove_target(name)
    _console.out.print(f"{_console.plain(name)}: forgotten")


def _print(rows: Sequence[KnownTarget], *, json: bool) -> None:
    if json:
        _console.as_json({"targets": rows})
        return
    if not rows:
        _console.out.print(
            "no target has a name of its own or is granted to a project. Without a server's token you need neither: "
            "`--on local`, `--on ssh:hosts.yaml` and the others work at once (`trainmaster submit --help`)"
        )
        return
    table = _console.table("name", "stands for", "project", "runs as", "")
    for row in rows:
        for one in row.granted or (None,):
            words = ("–", "–", "") if one is None else (one.project, one.account or "–", one.fault or one.note)
            table.add_row(*map(_console.plain, (row.name, row.word, *words)))
    _console.out.print(table)
