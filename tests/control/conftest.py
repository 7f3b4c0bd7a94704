from __future__ import annotations

import pytest

from trainmaster.store import Database


@pytest.fixture
def db(any_db: Database) -> Database:
    """The control plane is the same over SQLite and over PostgreSQL."""
    return any_db
