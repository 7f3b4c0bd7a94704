"""The option --server, and the token that goes with it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import LOCAL_TOKEN, SERVER_FILE, locate
from trainmaster.core.errors import UsageError
from trainmaster.core.loopback import is_loopback_host

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
_LISTEN = "0A"  # of /proc/net/tcp
TOKEN, TOKEN_FILE = "TRAINMASTER_TOKEN", "TRAINMASTER_TOKEN_FILE"


def open_client(server: str, home: Path | None = None) -> Client:
    """A client of the server. The token is never an argument: other users see arguments in the process list."""
    from trainmaster.client import Client

    return Client(server, read_token() or read_local_token(server, locate(home)), on_wait=_tell)


def _tell(text: str) -> None:
    _console.note(_console.plain(text))


@contextlib.contextmanager
def explain_missing_token() -> Iterator[None]:
    """Name the variables and the command for a token where the server refuses a request without one."""
    from trainmaster.client import NoAccess

    try:
        yield
    except NoAccess as error:
        if error.code != "no_token":
            raise
        message = (
            f"this server needs a token: set {TOKEN} or {TOKEN_FILE}; "
            "its admin makes one with: trainmaster token create NAME --role user"
        )
        raise NoAccess(error.status, error.code, message) from None


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
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{TOKEN_FILE}: {path} cannot be read: {error}") from None
    if mode & 0o077:
        raise UsageError(f"{TOKEN_FILE}: other users can read {path}; run: chmod 600 {path}")
    if not token:
        raise UsageError(f"{TOKEN_FILE}: {path} is empty")
    return token


def find_token_file() -> list[Path]:
    """The file that the environment names for the token, if it does."""
    return [Path(name).expanduser()] if (name := os.environ.get(TOKEN_FILE)) else []


def read_local_token(server: str, home: Path) -> str | None:
    """The token of this user's own server on this machine, from HOME/local.token; None for any other server.

    Only where the listening socket belongs to this user: another account could listen on the port of a server that has
    ended, and would receive the token.
    """
    try:
        host, port = urlsplit(server).hostname or "", urlsplit(server).port
        ours = urlsplit(str(json.loads((home / SERVER_FILE).read_text())["url"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not is_loopback_host(host) or port is None or port != ours.port or not _listens(port, os.geteuid()):
        return None
    try:
        return (home / LOCAL_TOKEN).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _listens(port: int, uid: int) -> bool:
    """Whether every socket that listens on this port belongs to the user."""
    owners = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    owners.add(int(fields[7]))
    return owners == {uid}
