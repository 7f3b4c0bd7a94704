from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmaster.store.database import Database
from trainmaster.web.app import create_app

# Starlette warns that it would rather have httpx2; both serve, and httpx is what this project depends on.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

BASE = "http://127.0.0.1:8470"
LOCAL = ("127.0.0.1", 50_000)  # where a request says that it comes from


@pytest.fixture
def client(db: Database, tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(db, tmp_path, reconcile=False)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        yield client
