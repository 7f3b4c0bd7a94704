from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database


@pytest.fixture
def db(any_db: Database) -> Database:
    """Every test of the store runs on SQLite and on PostgreSQL."""
    return any_db


@pytest.fixture
def sqlite_db(migrated_file: Path, tmp_path: Path) -> Iterator[Database]:
    """For what only SQLite has: its pragmas, its file, its query plans."""
    database = open_database(shutil.copyfile(migrated_file, tmp_path / "trainmaster.db"))
    yield database
    database.close()
