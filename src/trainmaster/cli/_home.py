"""The home folder: one database and the jobs' own folders. Where it is, and how a verb opens it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.core.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from trainmaster.storage import Store
    from trainmaster.store import Database

DATABASE = "TRAINMASTER_DATABASE"

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home", envvar="TRAINMASTER_HOME", help="Folder of the database and the jobs.", show_default="~/.trainmaster"
    ),
]

StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        envvar="TRAINMASTER_STORAGE",
        help="Folder or s3://bucket/prefix for what jobs leave; its credentials come from the environment.",
        show_default="HOME/storage",
    ),
]


def locate(home: Path | None) -> Path:
    """The home folder to use: as given, or ~/.trainmaster."""
    return (home or Path.home() / ".trainmaster").expanduser().absolute()


def open_home(home: Path | None) -> tuple[Path, Database]:
    """The home folder and its database, both made where they are not there yet."""
    try:
        from trainmaster.store import open_database
    except ModuleNotFoundError as missing:
        raise MissingExtra("the control plane", "server") from missing
    folder = locate(home)
    url = os.environ.get(DATABASE)
    if url and "://" not in url:  # a word without a scheme would name a new file in this folder
        raise UsageError(f"{DATABASE}: not a URL; write postgresql+psycopg://USER:PASSWORD@HOST/NAME, or unset it")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as wrong:
        raise UsageError(f"{folder}: cannot be made ({wrong.strerror}); give another with --home") from None
    return folder, open_database(url or folder / "trainmaster.db")


def open_storage(place: str | None, home: Path) -> Store:
    """Where what jobs leave is kept: as stated, or a folder of the home."""
    from trainmaster.storage import open_store

    return open_store(place or home / "storage")
