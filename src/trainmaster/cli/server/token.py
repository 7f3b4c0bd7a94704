"""`trainmaster token`: make, list and revoke the tokens of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption

if TYPE_CHECKING:
    from datetime import datetime

token = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Make, list and revoke tokens.

    A viewer reads, a user also submits and cancels, an admin does everything; in one project or in all.

    [bold]Examples[/]

      trainmaster token create alice --role user --project lab

      trainmaster token list

      trainmaster token revoke alice
    """,
)
Name = Annotated[str, typer.Argument(help="Name in the audit trail; it can be used once only.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@token.command("create")
def create(
    name: Name,
    role: Annotated[Literal["viewer", "user", "admin"], typer.Option(help="What it may do.")] = "user",
    project: Annotated[str | None, typer.Option(help="Only in this project; not stated: in all.")] = None,
    json: Json = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Make a token. It is shown once; only its hash is stored.

    [bold]Examples[/]

      trainmaster token create alice --role user --project lab

      (umask 077; trainmaster token create ci --role user > ~/.trainmaster-token)
    """
    with connect(home, server) as jobs:
        made = jobs.create_token(name, role=role, project=project)
    if json:
        _console.as_json({"name": name, "role": role, "project": project, "token": made})
        return
    # Alone on standard output, so that it can go into a file.
    _console.out.out(made)
    _console.note(f"{name}: {role} {f'in {project}' if project else 'everywhere'}; it cannot be shown again")
    if role != "viewer" and not (role == "admin" and project is None):
        _console.note(
            "it submits jobs to targets that are granted to its project: trainmaster target grant TARGET --project "
            f"{project or 'PROJECT'} --user ACCOUNT"
        )


@token.command("list")
def list_(json: Json = False, home: HomeOption = None, server: ServerOption = None) -> None:
    """List tokens, revoked ones too. The tokens themselves are not stored."""
    with connect(home, server) as jobs:
        rows = jobs.tokens()
    if json:
        _console.as_json({"tokens": rows})
        return
    table = _console.table("name", "role", "project", "created", "last used", "")
    for row in rows:
        revoked = "[red]revoked[/]" if row.revoked_at else ""
        table.add_row(row.name, row.role, row.project or "all", _day(row.created_at), _day(row.used_at), revoked)
    _console.out.print(table)


@token.command("revoke")
def revoke(name: Name, home: HomeOption = None, server: ServerOption = None) -> None:
    """Make a token useless from now on. Its name is not given out again."""
    with connect(home, server) as jobs:
        jobs.revoke_token(name)
    _console.out.print(f"{_console.plain(name)}: revoked")


def _day(when: datetime | None) -> str:
    return f"{when.astimezone():%Y-%m-%d %H:%M}" if when else "never"
