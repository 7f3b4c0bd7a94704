"""The home folder: the database and the folders of jobs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.core.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from trainmaster.storage import Store
    from trainmaster.store.database import Database

DATABASE = "TRAINMASTER_DATABASE"
HOSTS = "TRAINMASTER_HOSTS"  # folder of the hosts files that jobs name (targets/ssh); HOME/hosts
SERVER_FILE = "server.json"  # in the home folder while a server runs: {"pid", "url", "link", "storage"}
LOCAL_TOKEN = "local.token"  # noqa: S105 (a file name: the token of the server's own user, web/sign_in/local_access.py)
DATABASE_FILE = "trainmaster.db"
_ADVICE = {
    errno.EROFS: "mount it writable again, or give another home folder with --home",
    errno.ENOSPC: "free some space, then try again",
}

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
        help="Folder or s3://bucket/prefix for the files of jobs; credentials come from the environment.",
        show_default="HOME/storage",
    ),
]


def locate(home: Path | None) -> Path:
    """The home folder to use: as given, or ~/.trainmaster."""
    return (home or Path.home() / ".trainmaster").expanduser().absolute()


def locate_default() -> Path:
    """The home folder of a verb without `--home`."""
    stated = os.environ.get("TRAINMASTER_HOME")
    return locate(Path(stated) if stated else None)


def is_new(home: Path | None) -> bool:
    """Whether `open_home` would create its database."""
    return not os.environ.get(DATABASE) and not (locate(home) / DATABASE_FILE).exists()


@contextlib.contextmanager
def needing(what: str, extra: str = "server") -> Iterator[None]:
    """MissingExtra where a package that the block imports is not installed."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingExtra(what, extra) from missing


def open_home(home: Path | None) -> tuple[Path, Database]:
    """The home folder and its database, created where missing."""
    with needing("the control plane"):
        from trainmaster.store.migrate import open_database
    folder = locate(home)
    os.environ[HOSTS] = str(folder / "hosts")
    url = os.environ.get(DATABASE)
    if url and "://" not in url:  # a word without a scheme would name a new file in this folder
        raise UsageError(f"{DATABASE}: not a URL; write postgresql+psycopg://USER:PASSWORD@HOST/NAME, or unset it")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be created ({error.strerror}); give another with --home") from None
    if not url:
        _require_database(folder)
    protect(folder, database=not url)
    return folder, open_database(url or folder / DATABASE_FILE)


def _require_database(home: Path) -> None:
    """Refuse to create a database beside a server that does not use it: what it takes in would never be done."""
    from trainmaster.control.liveness import is_alive

    if not (home / DATABASE_FILE).exists() and is_alive(home):
        raise UsageError(
            f"{home}: a server runs on it, and there is no {DATABASE_FILE}. If the server uses PostgreSQL, "
            f"set {DATABASE} as it does, or give --server; if the file was deleted, stop the server and restore it"
        )


def protect(home: Path, *, database: bool = True) -> None:
    """Keep other accounts of the machine out of the database, the jobs and the storage, whatever mode the home has."""
    try:
        for name in ("jobs", "storage", "reconcilers"):
            (home / name).mkdir(mode=0o700, exist_ok=True)
            # Users of local jobs, whom only root can start, pass through `jobs` (remote/job_user.py).
            _close(home / name, 0o711 if name == "jobs" and os.geteuid() == 0 else 0o700)
        if database:  # SQLite gives its side files the mode of the database
            os.close(os.open(home / DATABASE_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        for suffix in ("", "-wal", "-shm", "-journal"):
            _close(home / f"{DATABASE_FILE}{suffix}", 0o600)
        for name in ("secret.key", LOCAL_TOKEN, SERVER_FILE):
            _close(home / name, 0o600)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "its owner must start this")
        raise UsageError(f"{error.filename}: cannot be protected ({error.strerror}); {advice}") from None


def _close(path: Path, mode: int) -> None:
    """Take away every permission beyond `mode`."""
    try:
        has = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return
    if has & ~mode:
        path.chmod(has & mode)


def find_storage(home: Path) -> str | None:
    """The storage of this home: of the environment, else of the server that runs on it. None: HOME/storage."""
    if place := os.environ.get("TRAINMASTER_STORAGE"):
        return place
    try:
        note = json.loads((home / SERVER_FILE).read_text())
        os.kill(int(note["pid"]), 0)  # the note of a killed server stays
        place = note.get("storage")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return place if isinstance(place, str) else None


def open_storage(place: str | None, home: Path) -> Store:
    """The storage of the files of jobs: as given, or a folder of the home."""
    from trainmaster.storage import open_store

    return open_store(place or home / "storage")
