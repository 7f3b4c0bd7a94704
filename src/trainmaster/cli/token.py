"""`trainmaster token`: who may ask a server, and for what."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from trainmaster.cli import _console, _server
from trainmaster.cli._home import HomeOption, open_home
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError

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
Name = Annotated[str, typer.Argument(help="Whom the audit trail will name; never given out twice.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_BY = "local"  # as control.submit calls who works on the database itself


@token.command("create")
def create(
    name: Name,
    role: Annotated[Literal["viewer", "user", "admin"], typer.Option(help="What it may do.")] = "user",
    project: Annotated[str | None, typer.Option(help="Only in this project; not stated: in all.")] = None,
    json: Json = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Make a token. It is shown this once; only its hash is kept.

    [bold]Examples[/]

      trainmaster token create alice --role user --project lab

      (umask 077; trainmaster token create ci --role user > ~/.trainmaster-token)
    """
    if server:
        with _server.connect(server) as client:
            made = client.create_token(name, role=role, project=project)
    else:
        made = _issue(name, role, project, home)
    if json:
        _console.as_json({"name": name, "role": role, "project": project, "token": made})
        return
    # Alone on standard output, so that it can go into a file.
    _console.out.out(made)
    _console.note(f"{name}: {role} {f'in {project}' if project else 'everywhere'}; it cannot be shown again")


@token.command("list")
def list_(json: Json = False, home: HomeOption = None, server: ServerOption = None) -> None:
    """List tokens, revoked ones too. What they are is not kept anywhere."""
    rows: list[Any]
    if server:
        with _server.connect(server) as client:
            rows = list(client.tokens())
    else:
        _, db = open_home(home)
        from trainmaster.store import tokens

        rows = list(tokens.list_tokens(db))
    if json:
        _console.as_json({"tokens": rows})
        return
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("name", "role", "project", "created", "last used", ""):
        table.add_column(column)
    for row in rows:
        revoked = "[red]revoked[/]" if row.revoked_at else ""
        table.add_row(row.name, row.role, row.project or "all", _day(row.created_at), _day(row.used_at), revoked)
    _console.out.print(table)


@token.command("revoke")
def revoke(name: Name, home: HomeOption = None, server: ServerOption = None) -> None:
    """Make a token useless from now on. Its name is not given out again."""
    if server:
        with _server.connect(server) as client:
            client.revoke_token(name)
    else:
        _, db = open_home(home)
        from trainmaster.store import audit, tokens

        with db.write() as conn:
            if not tokens.revoke(conn, name, at=datetime.now(UTC)):
                raise UsageError(f"there is no token {name!r}; `trainmaster token list` lists them")
            audit.record(conn, who=_BY, action="token.revoke", subject=f"token:{name}")
    _console.out.print(f"{_console.plain(name)}: revoked")


def _issue(name: str, role: str, project: str | None, home: Path | None) -> str:
    if not re.fullmatch(_NAME, name) or (project is not None and not re.fullmatch(_NAME, project)):
        raise UsageError(f"{name!r}, {project!r}: a name has letters, digits, dots, dashes and underscores, at most 63")
    _, db = open_home(home)
    from trainmaster.store import audit, tokens

    with db.write() as conn:
        made = tokens.issue(conn, name=name, role=tokens.Role(role), project=project, at=datetime.now(UTC))
        if made is None:
            raise UsageError(f"the name {name} was given to another token; take a new one")
        detail = {"role": role, "project": project}
        audit.record(conn, who=_BY, action="token.create", subject=f"token:{name}", detail=detail)
    return made


_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"  # as the API has it (web/dependencies.py)


def _day(when: datetime | None) -> str:
    return f"{when.astimezone():%Y-%m-%d %H:%M}" if when else "never"
