from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmaster.store import Database


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = Database.open(tmp_path / "trainmaster.db")
    yield database
    database.close()
