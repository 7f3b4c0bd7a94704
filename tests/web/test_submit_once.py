"""A submission that is sent twice makes one job, on both databases and from many senders at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster.core.schema import to_plain
from trainmaster.store import costs, jobs
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.furnished import JOBS

pytestmark = pytest.mark.both_databases


@pytest.fixture
def client(any_db: Database, tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(create_app(any_db, tmp_path, reconcile=False), base_url=BASE, client=LOCAL) as found:
        yield found


def send(client: TestClient, key: str | None, **changes: Any) -> Any:
    headers = {"Idempotency-Key": key} if key is not None else {}
    return client.post(JOBS, json=to_plain(samples.spec(**changes)), headers=headers)


def test_duplicate_job_submission(client: TestClient, any_db: Database) -> None:
    """Seed 004 phase 7.4."""
    first, again = send(client, "k1"), send(client, "k1")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert first.headers["location"] == again.headers["location"]
    other = send(client, "k1", name="other")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "key_taken")
    assert send(client, "k1", project="infra").status_code == 201  # a key names something within its project
    assert send(client, "k2").status_code == 201
    assert send(client, None).status_code == send(client, None).status_code == 201
    assert jobs.count_jobs(any_db) == 5


def test_many_at_once_make_one_job(client: TestClient, any_db: Database) -> None:
    with ThreadPoolExecutor(8) as senders:
        answers = list(senders.map(lambda _: send(client, "k"), range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert jobs.count_jobs(any_db) == 1


def test_a_key_is_a_word(client: TestClient) -> None:
    keys: list[Any] = ["", "x" * 256, "a b", "\u00e4".encode()]
    for key in keys:
        answer = client.post(JOBS, json=to_plain(samples.spec()), headers={"Idempotency-Key": key})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_request"), key


def test_a_project_that_has_spent_its_budget_gets_no_job(client: TestClient, any_db: Database) -> None:
    with any_db.write() as conn:
        costs.set_budget(conn, "research", "total", 0, at=samples.T0)
    answer = send(client, None, resources={"price_per_hour": 2.0})
    assert (answer.status_code, answer.json()["error"]["code"]) == (402, "over_budget")
    assert jobs.count_jobs(any_db) == 0
