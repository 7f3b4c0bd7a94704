"""How pages write a target: by its name (`target add`), else by its word without the folders of a long path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from trainmaster import targets
from trainmaster.store import known_targets
from trainmaster.store.database import Database

_WHOLE = 24  # characters of a word that is never shortened


def read(db: Database) -> Mapping[str, str]:
    """The name of each word that has one."""
    with db.read() as conn:
        return {known.word: known.name for known in known_targets.list_targets(conn)}


def shorten(word: str, names: Mapping[str, str]) -> str:
    """A target as a page shows it beside a machine; the whole word belongs into the title."""
    if word in names:
        return names[word]
    _, name, option = targets.split(word)
    file = PurePath(option or "").name
    return f"{name}:…/{file}" if len(word) > _WHOLE and file and file != option else word


def without_account(word: str) -> str:
    """A target without the account of a project."""
    _, name, option = targets.split(word)
    return f"{name}:{option}" if option else name


def of_project(word: str) -> str:
    """What a caller of one project is told: the account and the path of a hosts file are the server's."""
    return targets.split(word)[1]
