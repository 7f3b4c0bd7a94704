from __future__ import annotations

import pytest

from trainmaster.store.database import Database


@pytest.fixture
def db(any_db: Database) -> Database:
    """SQLite, and PostgreSQL where a test has the mark `both_databases`: the statements are tested in tests/store."""
    return any_db
