"""A server instead of the home folder: where it is, the token, and how a verb finds its job there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.core.errors import UsageError
from trainmaster.core.ids import is_uuid

if TYPE_CHECKING:
    from trainmaster.client import Client

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="TRAINMASTER_SERVER",
        help="Address of a server to ask instead of the home folder. Its token: TRAINMASTER_TOKEN(_FILE).",
        show_default=False,
    ),
]
TOKEN, TOKEN_FILE = "TRAINMASTER_TOKEN", "TRAINMASTER_TOKEN_FILE"
_WORD = re.compile(r"[A-Za-z0-9.-]{1,63}")
_MOST = 200  # jobs of one answer


def connect(server: str) -> Client:
    """A client of the server. The token is never an argument: others could read it in the list of processes."""
    from trainmaster.client import Client

    return Client(server, read_token())


def read_token() -> str | None:
    """The token from the environment or from a file that only its owner may read; None where there is none."""
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
        raise UsageError(f"{TOKEN_FILE}: others may read {path}; run: chmod 600 {path}")
    if not token:
        raise UsageError(f"{TOKEN_FILE}: {path} is empty")
    return token


def find(client: Client, word: str) -> str:
    """The id of the job with this id, a unique beginning of it, or the newest with this name."""
    if is_uuid(word):
        return word
    begun: list[str] = []
    if not _WORD.fullmatch(word):
        raise UsageError(f"{word!r} is no id and no name of a job; `trainmaster jobs` lists them")
    offset = 0
    while True:
        page = client.jobs(find=word, limit=_MOST, offset=offset)
        for line in page.jobs:
            if line.name == word:
                return line.id
            if line.id.startswith(word):
                begun.append(line.id)
        offset += len(page.jobs)
        if not page.jobs or offset >= page.total:
            break
    if not begun:
        raise UsageError(f"no job {word!r}; `trainmaster jobs` lists them")
    if len(begun) > 1:
        ids = ", ".join(found[:13] for found in begun[:5])
        raise UsageError(f"{word!r} begins {len(begun)} jobs ({ids} …); write more of the id")
    return begun[0]
