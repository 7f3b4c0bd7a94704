"""Bodies that no layer can use are refused with 4xx; HEAD of the health paths; readiness with an unusable storage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from trainmaster.store.database import Database
from trainmaster.web.app import create_app

JOBS = "/v1/training/jobs"
DEEP = '{"a":' * 900 + "1" + "}" * 900


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        '{"name":"a","command":["x"],"env":' + DEEP + "}",
        '{"name":"a","command":["x"],"limits":{"timeout_s":' + "9" * 4200 + "}}",
        '{"name":"a","command":["x"],"resources":{"nodes":' + "9" * 4200 + "}}",
        '{"name":"a","command":["\\ud800"]}',
        '{"name":"a","command":["x"],"env":{"A":"\\udfff"}}',
        '{"name":"a","command":["x"],"\\ud800":1}',
        "[" * 900 + "]" * 900,
    ],
    ids=[
        "deep",
        "deep env",
        "digits",
        "digits of nodes",
        "surrogate",
        "surrogate in env",
        "surrogate name",
        "deep list",
    ],
)
def test_a_hostile_spec_is_a_bad_request(client: TestClient, body: str) -> None:
    answer = client.post(JOBS, content=body.encode(), headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert json.loads(answer.content)["error"]["code"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokens", '{"name":"\\ud800","role":"user"}'),
        ("/v1/tokens", '{"name":"a","role":"user","\\ud800":1}'),
        ("/v1/tokens", '{"name":"a","role":"user","project":"\\udfff"}'),
        ("/v1/webhooks", '{"url":"https://example.org/\\ud800"}'),
        ("/v1/webhooks", DEEP),
    ],
)
def test_a_hostile_body_elsewhere_is_a_bad_request(client: TestClient, path: str, body: str) -> None:
    answer = client.post(path, content=body.encode(), headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_head_of_a_health_path_has_the_status_and_no_body(client: TestClient, path: str) -> None:
    answer = client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_server_with_unusable_storage_is_not_ready(db: Database, tmp_path: Path) -> None:
    (tmp_path / "storage").write_text("a file where the folder should be")
    app = create_app(db, tmp_path, reconcile=False)
    with TestClient(app, base_url="http://127.0.0.1:8470", client=("127.0.0.1", 50_000)) as client:
        answer = client.get("/readyz")
        assert answer.status_code == 503 and "storage" in answer.json()["faults"][0]
        assert client.get("/healthz").status_code == 200, "it is alive"
