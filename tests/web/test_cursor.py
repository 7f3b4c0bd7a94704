"""Paging by cursor over the API: each row comes once while others are inserted; with an offset rows repeat."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pages import samples
from trainmaster.core.events import Event
from trainmaster.store.database import Database

from .conftest import TestClient

JOBS, EVALUATIONS = "/v1/training/jobs", "/v1/training/evaluations"


def add_job(db: Database, number: int) -> str:
    return samples.Story(db, samples.spec(), at=samples.T0 + timedelta(microseconds=number // 2)).id


def walk(client: TestClient, path: str, name: str, *, cursor: bool, insert: Any) -> list[Any]:
    """Every id, two of them at a time, with a new row before each page but the first."""
    ids: list[Any] = []
    page = client.get(path, params={"limit": 2}).json()
    while page[name] and len(ids) < 50:
        ids += [row["id"] for row in page[name]]
        insert()
        place = {"after": page["next"]} if cursor else {"offset": len(ids)}
        page = client.get(path, params={"limit": 2, **place}).json()
    assert not cursor or page["next"] is None
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("cursor", [True, False])
def test_each_job_comes_once_while_others_are_submitted(db: Database, client: TestClient, cursor: bool) -> None:
    first = [add_job(db, number) for number in range(5)]  # two of one moment are told apart by their id
    numbers = iter(range(5, 1000))
    ids = walk(client, JOBS, "jobs", cursor=cursor, insert=lambda: add_job(db, next(numbers)))
    assert (len(ids) == len(set(ids))) is cursor
    assert set(first) <= set(ids)


@pytest.mark.slow
@pytest.mark.parametrize("cursor", [True, False])
def test_each_evaluation_comes_once_while_others_are_recorded(db: Database, client: TestClient, cursor: bool) -> None:
    story = samples.Story(db, samples.spec()).start()

    def insert(many: int = 1) -> None:
        story.tell([Event(phase="EVAL_MODEL", event="metrics", data={"model_id": "m", "f1": 0.5})] * many)

    insert(5)
    ids = walk(client, EVALUATIONS, "evaluations", cursor=cursor, insert=insert)
    assert (len(ids) == len(set(ids))) is cursor
    assert len(set(ids)) >= 5


@pytest.mark.parametrize(
    ("path", "after"),
    [(JOBS, "1"), (JOBS, "x:y"), (JOBS, "9" * 18 + ":00000000-0000-4000-8000-000000000000"), (EVALUATIONS, "-1")],
)
def test_what_is_no_cursor_is_refused(client: TestClient, path: str, after: str) -> None:
    answer = client.get(path, params={"after": after})
    assert answer.status_code == 422 and answer.json()["error"]["faults"][0]["path"] == "after"


def test_the_latest_cursor_is_a_time(client: TestClient) -> None:
    after = "9" * 17 + ":00000000-0000-4000-8000-000000000000"
    assert client.get(JOBS, params={"after": after}).status_code == 200
