"""The server runs the reconciler beside itself and says how it stands: running, starting, or dead."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from trainmaster.control import reconcile
from trainmaster.store.database import Database
from trainmaster.web.app import create_app


def client(db: Database, home: Path) -> TestClient:
    return TestClient(create_app(db, home, reconcile=True), base_url="http://127.0.0.1:8470")


def wait_for(client: TestClient, word: str) -> int:
    deadline = time.monotonic() + 20
    while True:
        answer = client.get("/healthz")
        if answer.json()["reconciler"] == word:
            return answer.status_code
        assert time.monotonic() < deadline, answer.json()
        time.sleep(0.02)


@pytest.mark.slow
def test_two_servers_on_one_database_both_drive(db: Database, tmp_path: Path) -> None:
    with client(db, tmp_path) as first, client(db, tmp_path) as second:
        assert wait_for(first, "running") == wait_for(second, "running") == 200


def test_a_dead_reconciler_is_no_health(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(reconcile, "run", die)
    with client(db, tmp_path) as watched:
        assert wait_for(watched, "failed") == 503
