"""Money, webhooks and machines through the API."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pytest
from sqlalchemy import insert
from starlette.testclient import TestClient

from pages import samples
from trainmaster.control.notify.channels import TOPICS
from trainmaster.control.notify.signing import sign
from trainmaster.store import costs, tables
from trainmaster.store.database import Database
from trainmaster.web.routes.webhooks import Topic
from web.furnished import JOBS


def test_costs_are_cents_and_unknown_is_never_nothing(client: TestClient, db: Database) -> None:
    story = samples.completed(db)  # from noon, for a minute and a bit
    assert client.get(f"{JOBS}/{story.id}/cost").json()["total"] == {
        "cents": None, "known_cents": 0, "unknown_parts": 1,
    }  # fmt: skip
    with db.write() as conn:
        costs.set_price(conn, story.attempt, 360_000.0)  # a dollar a second
    cost = client.get(f"{JOBS}/{story.id}/cost").json()
    seconds = (story.at - samples.T0).total_seconds()
    assert 0 < cost["total"]["cents"] <= seconds * 100
    assert (cost["cents_per_hour"], cost["max_cost_cents"]) == (0.0, None)  # it is over
    whole = client.get("/v1/cost").json()
    assert whole["month"] == f"{datetime.now(UTC):%Y-%m}"
    assert [(each["project"], each["total"]) for each in whole["projects"]] == [("research", cost["total"])]


def test_budgets_are_set_shown_and_removed(client: TestClient) -> None:
    path = "/v1/budgets/research/month"
    assert client.put(path, json={"cap_cents": 500}).json()["spent"]["cents"] == 0
    assert client.put(path, json={"cap_cents": 700}).status_code == 200
    assert [row["cap_cents"] for row in client.get("/v1/budgets?project_id=research").json()["budgets"]] == [700]
    assert client.delete(path).status_code == 204
    assert client.delete(path).status_code == 404
    for body in ({"cap_cents": -1}, {"cap_cents": True}, {"cap_cents": 1.5}, {}, {"cap_cents": 1, "x": 1}):
        assert client.put(path, json=body).status_code == 422, body
    assert client.put("/v1/budgets/research/year", json={"cap_cents": 1}).status_code == 422


def test_a_webhook_shows_its_key_once(client: TestClient, tmp_path: Path) -> None:
    made = client.post("/v1/webhooks", json={"url": "https://hooks.example.org/x", "topics": ["job.failed"]}).json()
    key = hmac.new((tmp_path / "secret.key").read_bytes(), f"webhook:{made['id']}".encode(), hashlib.sha256)
    assert made["signing_key"] == key.hexdigest()
    assert sign(made["signing_key"], b"{}", at=1).startswith("t=1,v1=")
    listed = client.get("/v1/webhooks").json()["webhooks"]
    assert [row["topics"] for row in listed] == [["job.failed"]]
    assert "signing_key" not in listed[0]
    for body in ({"url": "http://example.org"}, {"url": "https://u:p@example.org"}, {"url": "ftp://x"},
                 {"url": "https://x", "topics": ["job.eaten"]}):  # fmt: skip
        assert client.post("/v1/webhooks", json=body).status_code == 422, body


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "127.0.0.1", "[::1]", "[fe80::1]", "0.0.0.0", "[::ffff:127.0.0.1]"]
)
def test_a_webhook_to_a_forbidden_address_is_refused_until_an_admin_allows_it(
    client: TestClient, tmp_path: Path, host: str
) -> None:
    wish = {"url": f"https://{host}:8443/x"}
    refused = client.post("/v1/webhooks", json=wish)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "bad_url")
    assert client.get("/v1/webhooks").json()["webhooks"] == []
    file = tmp_path / "notify.yaml"
    file.write_text(f'allow_hosts: ["{host.strip("[]")}"]\n')
    file.chmod(0o600)
    assert client.post("/v1/webhooks", json=wish).status_code == 201


def test_the_topics_of_the_document_are_those_that_are_told() -> None:
    assert get_args(Topic) == TOPICS


def test_nodes_and_instances(client: TestClient, db: Database) -> None:
    good, bad = samples.completed(db), samples.failed_check(db)
    at = samples.T0
    row = {"attempt": good.attempt, "target": "lambda", "nonce": "n1", "state": "active", "created_at": at}
    with db.write() as conn:
        conn.execute(insert(tables.instances).values(row))
    nodes = client.get("/v1/nodes").json()["nodes"]
    # Both attempts ran on the same machine: what the last one found is what holds.
    assert [(node["node"], node["job_id"], node["verdict"]) for node in nodes] == [("node-17", bad.id, "fail")]
    assert nodes[0]["checks"] == {"fail": 1, "pass": 3, "skip": 1, "warn": 1}
    assert [each["nonce"] for each in client.get("/v1/instances?state=active").json()["instances"]] == ["n1"]
    assert client.get("/v1/instances?state=gone").json()["instances"] == []
    assert len(client.get(f"{JOBS}/{good.id}/instances").json()["instances"]) == 1
    assert client.get(f"{JOBS}/{bad.id}/instances").json()["instances"] == []
    assert {check["verdict"] for check in client.get(f"{JOBS}/{bad.id}/checks").json()["checks"]} >= {"fail"}
