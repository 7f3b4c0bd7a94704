"""What watches over a server is told the truth: ready, alive, how many, how slow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from pages import samples
from postgres import Postgres
from trainmaster.core.events import Event
from trainmaster.core.states import Stage
from trainmaster.store import outbox
from trainmaster.store.database import Database, connect
from trainmaster.store.migrate import open_database
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.furnished import JOBS
from web.test_reconciler import wait_for


def over(db: Database, home: Path, *, reconcile: bool = False) -> TestClient:
    return TestClient(create_app(db, home, reconcile=reconcile), base_url=BASE, client=LOCAL)


def figures(client: TestClient) -> Callable[[str], float]:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")

    def find(name: str) -> float:
        match = re.search(rf"^trainmaster_{re.escape(name)} (\S+)$", answer.text, re.MULTILINE)
        assert match, f"{name} is not in\n{answer.text}"
        return float(match[1])

    return find


def test_metrics_count_what_is_there(any_db: Database, tmp_path: Path) -> None:
    client = over(any_db, tmp_path)
    samples.completed(any_db)
    story = samples.Story(any_db).start().move(Stage.RUNNING)
    story.tell([Event(phase="STEP", event="metrics", ts=samples.T0, data={"step": 1})])
    with any_db.write() as conn:
        outbox.insert_news(conn, key="k", topic="job.failed", project="p", job_id=None, payload={}, at=samples.T0)
    for _ in range(3):
        client.get(f"{JOBS}/{story.id}")
    client.get(f"{JOBS}/x")
    get = figures(client)
    assert get('jobs{status="completed"}') == get('jobs{status="running"}') == 1
    assert get("outbox_waiting") == 1
    assert get('event_lag_seconds{quantile="0.95"}') > 0
    path = 'method="GET",path="/v1/training/jobs/{uuid}"'
    assert get(f'request_seconds_count{{{path},status="200"}}') == 3  # of the route, not of each job
    assert get(f'request_seconds_count{{{path},status="404"}}') == 1


def test_ticks_are_counted_and_a_server_that_drives_is_ready(db: Database, tmp_path: Path) -> None:
    with over(db, tmp_path, reconcile=True) as client:
        wait_for(client, "running")
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()) == (200, {"ready": True, "faults": []})
        assert figures(client)("reconciler_ticks_total") >= 1
        assert figures(client)("reconciler_tick_age_seconds") >= 0


def test_a_database_that_is_away_is_said_and_nothing_breaks(tmp_path: Path) -> None:
    away = Database(connect("postgresql+psycopg://nobody@127.0.0.1:1/nothing"))
    client = over(away, tmp_path)
    assert client.get("/healthz").status_code == 200  # this process is well: starting it again would not help
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert "cannot be asked" in ready.json()["faults"][0]
    for path in (JOBS, "/metrics", "/v1/audit"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_away")
        assert "127.0.0.1" not in answer.text
        assert answer.headers["retry-after"]
    # Caller it is cannot be told without the database: not let in, and not told that the token is wrong.
    assert client.get(JOBS, headers={"Authorization": "Bearer tm_" + "A" * 43}).status_code == 503


def test_a_schema_of_another_version_is_not_ready(db: Database, tmp_path: Path) -> None:
    with db.write() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    answer = over(db, tmp_path).get("/readyz")
    assert answer.status_code == 503
    assert "0001" in answer.json()["faults"][0]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_database_file_that_was_taken_away_is_not_ready(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "trainmaster.db"
    db = open_database(path)
    with over(db, tmp_path, reconcile=True) as client:
        wait_for(client, "running")
        path.unlink()
        if replaced:
            open_database(path).close()
        ready = client.get("/readyz")
        assert ready.status_code == 503
        word = "replaced" if replaced else "deleted"
        assert f"{path}: was {word} while in use" in ready.json()["faults"][0]
        for token in ({}, {"Authorization": "Bearer tm_" + "A" * 43}):
            answer = client.get(JOBS, headers=token)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_away")
    assert path.exists() is replaced, "no empty database takes its place"
    db.close()


def test_a_database_that_is_read_only_is_not_ready_and_says_so(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.create()
    db = open_database(url)
    story = samples.Story(db).start()
    db.close()
    standby = open_database(url + "?options=-cdefault_transaction_read_only%3Don")
    client = over(standby, tmp_path)
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["faults"][0][:29]) == (503, "the database is read-only: a ")
    assert client.get(JOBS).status_code == 200, "it is still shown"
    refused = client.post(f"{JOBS}/{story.id}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "database_away")
    standby.close()


def test_a_server_whose_database_is_locked_is_alive(postgres: Postgres, tmp_path: Path) -> None:
    """More requests wait for the lock than there are threads for requests."""
    db = open_database(postgres.create())
    with over(db, tmp_path) as client, ThreadPoolExecutor(60) as pool:
        with db.write() as conn:
            conn.execute(text("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE"))
            waiting = [pool.submit(client.get, JOBS) for _ in range(50)]
            time.sleep(1)
            alive = pool.submit(client.get, "/healthz")
            done, _ = wait([alive], timeout=10)
        assert done, "/healthz waited for the database"
        assert alive.result().status_code == 200
        assert {each.result().status_code for each in waiting} == {200}
    db.close()


def test_a_request_waits_for_a_locked_table_as_long_as_sqlite_would(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited until the lock was gone."""
    monkeypatch.setattr("trainmaster.store.database._BUSY_MS", 300)
    db = open_database(postgres.create())
    with over(db, tmp_path) as client, ThreadPoolExecutor(1) as pool:
        with db.write() as conn:
            conn.execute(text("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE"))
            waiting = pool.submit(client.get, JOBS)
            done, _ = wait([waiting], timeout=20)
        assert done, "it waited for the lock without end"
        answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_away")
        assert client.get(JOBS).status_code == 200
    db.close()
