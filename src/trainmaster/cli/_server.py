"""The option --server, and the token that goes with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.client import Client

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="TRAINMASTER_SERVER",
        help="URL of a server to use instead of the home folder. Its token: TRAINMASTER_TOKEN(_FILE).",
        show_default=False,
    ),
]
TOKEN, TOKEN_FILE = "TRAINMASTER_TOKEN", "TRAINMASTER_TOKEN_FILE"


def open_client(server: str) -> Client:
    """A client of the server. The token is never an argument: other users see arguments in the process list."""
    from trainmaster.client import Client

    return Client(server, read_token())


def read_token() -> str | None:
    """The token from the environment, or from a file with mode 0600; None if neither is set."""
    if token := os.environ.get(TOKEN):
        return token
    if not (name := os.environ.get(TOKEN_FILE)):
        return None
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as wrong:
        raise UsageError(f"{TOKEN_FILE}: {path} cannot be read: {wrong}") from None
    if mode & 0o077:
        raise UsageError(f"{TOKEN_FILE}: other users can read {path}; run: chmod 600 {path}")
    if not token:
        raise UsageError(f"{TOKEN_FILE}: {path} is empty")
    return token
