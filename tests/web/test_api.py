"""Every JSON route: what it answers, and the typed error of everything that can be asked wrongly."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster import __version__
from trainmaster.api.codec import to_plain
from trainmaster.core import schema
from trainmaster.pages import job, jobs
from trainmaster.store import events
from trainmaster.store.database import Database
from trainmaster.store.jobs import count_jobs, find_job

JOBS = "/v1/training/jobs"
NOBODY = "00000000-0000-4000-8000-000000000000"


def error(client: TestClient, method: str, path: str, **ask: Any) -> tuple[int, str]:
    answer = client.request(method, path, **ask)
    return answer.status_code, answer.json()["error"]["code"]


def test_hello_and_health(client: TestClient) -> None:
    assert client.get("/api/hello").json() == {"message": "Hello World", "version": __version__}
    assert client.get("/healthz").json() == {"status": "ok", "version": __version__, "reconciler": "off"}


def test_the_list_is_the_page(client: TestClient, db: Database) -> None:
    samples.completed(db)
    samples.failed_check(db)
    samples.pending(db, project="infra")
    got = client.get(JOBS).json()
    assert got["total"] == 3
    assert got["jobs"] == to_plain(jobs.read(db))["jobs"]
    assert [line["status"] for line in client.get(f"{JOBS}?status=failed").json()["jobs"]] == ["failed"]
    assert [line["project"] for line in client.get(f"{JOBS}?project_id=infra").json()["jobs"]] == ["infra"]
    assert len(client.get(f"{JOBS}?limit=2&offset=1").json()["jobs"]) == 2
    assert len(client.get(f"{JOBS}?limit=2&offset=2").json()["jobs"]) == 1


@pytest.mark.parametrize("query", ["status=great", "limit=0", "limit=9999", "offset=-1", "limit=x", "project_id=%00"])
def test_a_wrong_query_is_named(client: TestClient, query: str) -> None:
    answer = client.get(f"{JOBS}?{query}")
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "bad_request"
    assert answer.json()["error"]["faults"][0]["path"] == query.partition("=")[0]


def test_a_job_is_its_page(client: TestClient, db: Database) -> None:
    story = samples.completed(db)
    got = client.get(f"{JOBS}/{story.id}").json()
    page = to_plain(job.read(db, story.id))
    assert {**got, "made_at": None} == {**page, "made_at": None}


@pytest.mark.parametrize("job_id", [NOBODY, "x", "%00", "..%2f..", "a" * 500])
def test_an_unknown_job_is_not_found(client: TestClient, job_id: str) -> None:
    assert error(client, "GET", f"{JOBS}/{job_id}") == (404, "not_found")
    assert error(client, "POST", f"{JOBS}/{job_id}/cancel") == (404, "not_found")
    assert error(client, "GET", f"{JOBS}/{job_id}/events") == (404, "not_found")


def test_submit_queues_a_job(client: TestClient, db: Database) -> None:
    spec = samples.spec()
    answer = client.post(JOBS, json=schema.to_plain(spec))
    assert answer.status_code == 201, answer.text
    body = answer.json()
    assert (body["status"], body["stage"], body["name"]) == ("pending", "queued", spec.name)
    assert answer.headers["location"] == f"{JOBS}/{body['id']}"
    row = find_job(db, body["id"])
    assert row is not None
    assert row.spec == spec


def test_every_fault_of_a_spec_is_named_and_nothing_is_created(client: TestClient, db: Database) -> None:
    answer = client.post(JOBS, json={"name": "Bad Name", "trian": {}, "limits": {"attempts": 0}})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "bad_spec"
    assert {"name", "trian", "limits.attempts"} <= {fault["path"] for fault in error["faults"]}
    assert all(fault["message"] for fault in error["faults"])
    assert count_jobs(db) == 0


def test_a_target_nobody_knows_is_a_fault_of_the_spec(client: TestClient, db: Database) -> None:
    answer = client.post(JOBS, json={**schema.to_plain(samples.spec()), "target": "moon"})
    assert answer.status_code == 422
    assert [fault["path"] for fault in answer.json()["error"]["faults"]] == ["target"]
    assert count_jobs(db) == 0


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (b"{", "application/json", (400, "not_json")),
        (b"[" * 100_000, "application/json", (400, "not_json")),
        (b'{"name": NaN}', "application/json", (400, "not_json")),
        (
            b'{"name": "a", "command": ["true"], "target": "local", "target": "x"}',
            "application/json",
            (400, "not_json"),
        ),
        (b"\xff\xfe\x00", "application/json", (400, "not_json")),
        (b"[]", "application/json", (422, "bad_spec")),
        (b"{}", "text/plain", (415, "not_json")),
        (b"{}", "application/x-www-form-urlencoded", (415, "not_json")),
        (b" " * (1 << 20) + b"{}", "application/json", (413, "too_large")),
    ],
)
def test_a_body_that_is_no_spec(client: TestClient, body: bytes, kind: str, expected: tuple[int, str]) -> None:
    assert error(client, "POST", JOBS, content=body, headers={"content-type": kind}) == expected


def test_a_body_of_unsaid_length_is_limited_too(client: TestClient) -> None:
    chunks = (b" " * 65536 for _ in range(40))
    assert error(client, "POST", JOBS, content=chunks, headers={"content-type": "application/json"}) == (
        413,
        "too_large",
    )


def test_cancel_asks_once_and_again(client: TestClient, db: Database) -> None:
    story = samples.resumed(db)
    for _ in range(2):
        answer = client.post(f"{JOBS}/{story.id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
    row = find_job(db, story.id)
    assert row is not None
    assert row.cancel_requested


def test_a_finished_job_cannot_be_cancelled(client: TestClient, db: Database) -> None:
    assert error(client, "POST", f"{JOBS}/{samples.completed(db).id}/cancel") == (400, "already_final")


def test_events_come_page_by_page_each_once(client: TestClient, db: Database) -> None:
    story = samples.resumed(db)
    received: list[Any] = []
    after = ""
    while True:
        got = client.get(f"{JOBS}/{story.id}/events?limit=50{after}").json()
        if not got["events"]:
            break
        received += got["events"]
        after = f"&after={got['next']}"
    rows = events.list_events(db, story.id, limit=10_000)
    assert received == to_plain(rows)
    assert got["next"] == after.removeprefix("&after=")


def test_events_after_nonsense(client: TestClient, db: Database) -> None:
    assert error(client, "GET", f"{JOBS}/{samples.pending(db).id}/events?after=x") == (422, "bad_request")


def test_other_addresses_and_methods(client: TestClient) -> None:
    assert error(client, "GET", "/v1/nothing") == (404, "not_found")
    assert error(client, "DELETE", JOBS) == (405, "method_not_allowed")


def test_the_schema_is_served_and_no_page_from_a_cdn(client: TestClient) -> None:
    paths = client.get("/v1/openapi.json").json()["paths"]
    assert {JOBS, f"{JOBS}/{{uuid}}", f"{JOBS}/{{uuid}}/cancel", f"{JOBS}/{{uuid}}/events"} <= set(paths)
    assert client.get("/docs").status_code == 404
