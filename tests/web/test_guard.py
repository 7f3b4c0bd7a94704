"""A foreign site can neither read nor change anything through the user's browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster.store import jobs
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.furnished import read_page

JOBS = "/v1/training/jobs"


@pytest.mark.slow
@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:8470", "[::1]:8470", "LOCALHOST"])
def test_names_of_loopback_are_let_in(client: TestClient, host: str) -> None:
    assert client.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:8470", "", "[::1", "a@b"])
def test_a_foreign_name_on_loopback_is_refused(client: TestClient, host: str) -> None:
    answer = client.get("/healthz", headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "wrong_host")


def test_a_name_can_be_allowed(db: Database, tmp_path: Path) -> None:
    app = create_app(db, tmp_path, reconcile=False, hosts=["trainmaster.example"])
    with TestClient(app, base_url="http://127.0.0.1:8470") as client:
        assert client.get("/healthz", headers={"host": "trainmaster.example"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:8470"},
    ],
)
def test_a_foreign_page_changes_nothing(client: TestClient, db: Database, headers: dict[str, str]) -> None:
    story = samples.resumed(db)
    for path in (f"/jobs/{story.id}/cancel", f"{JOBS}/{story.id}/cancel", JOBS):
        answer = client.post(path, headers=headers, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")
    row = jobs.find_job(db, story.id)
    assert row is not None
    assert not row.cancel_requested
    assert jobs.count_jobs(db) == 1


@pytest.mark.parametrize(
    "headers", [{}, {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8470"}, {"sec-fetch-site": "none"}]
)
def test_our_own_page_and_programs_may(client: TestClient, db: Database, headers: dict[str, str]) -> None:
    assert client.post(f"{JOBS}/{samples.resumed(db).id}/cancel", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/", "/healthz", "/no", "/v1/no", "/static/page.js", JOBS])
def test_every_answer_carries_the_headers(client: TestClient, path: str) -> None:
    for headers in ({}, {"host": "evil.example"}):
        answer = client.get(path, headers=headers)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"


def test_pages_hold_nothing_the_policy_would_refuse(client: TestClient, db: Database) -> None:
    story = samples.resumed(db)
    for path in ("/", f"/jobs/{story.id}", "/no"):
        text = read_page(client.get(path))
        assert " style=" not in text
        assert "<script>" not in text
        assert "onclick" not in text
