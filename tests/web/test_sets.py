"""Sets of runs over REST and on the pages: the roles of jobs, one row in Runs, one page with the table, one cancel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from trainmaster.control.queueing import sets
from trainmaster.core.roles import Role
from trainmaster.store.capacity import sets as store
from trainmaster.store.database import Database
from trainmaster.store.jobs import list_ids
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.furnished import issue

BODY: dict[str, Any] = {
    "name": "lr", "command": ["train", "{size}"], "parallel": 1, "matrix": {"size": ["<s>", "l"], "env.SEED": ["1"]},
}  # fmt: skip


@pytest.fixture
def tokens(db: Database) -> dict[str, dict[str, str]]:
    roles = {"user": (Role.USER, "lab"), "viewer": (Role.VIEWER, "lab"), "stranger": (Role.USER, "other")}
    return {name: issue(db, name, *rights) for name, rights in roles.items()}


def test_a_set_is_submitted_shown_and_cancelled_by_its_project_alone(
    db: Database, tmp_path: Path, tokens: dict[str, dict[str, str]]
) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True, trust_jobs=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        assert client.post("/v1/sets", json=BODY, headers=tokens["viewer"]).status_code == 403
        assert client.post("/v1/sets", json={**BODY, "project": "x"}, headers=tokens["user"]).status_code == 403
        bad = client.post("/v1/sets", json={**BODY, "matrix": {"size": []}}, headers=tokens["user"])
        assert (bad.status_code, bad.json()["error"]["faults"][0]["path"]) == (422, "matrix.size")
        nul = client.post("/v1/sets", json={**BODY, "matrix": {"size": ["\x00"]}}, headers=tokens["user"])
        assert nul.status_code == 422 and client.post("/v1/sets", json=[], headers=tokens["user"]).status_code == 422
        assert store.list_sets(db) == []
        made = client.post("/v1/sets", json=BODY, headers=tokens["user"])
        assert made.status_code == 201, made.text
        line = made.json()["set"]
        assert (line["project"], line["trials"], line["submitted_by"]) == ("lab", 2, "user")
        sets.advance(db)
        (job,) = list_ids(db)
        page = f"/sets/{line['id']}"
        for path in (f"/v1{page}", page):
            seen = client.get(path, headers=tokens["viewer"])
            assert seen.status_code == 200 and job in seen.text
            assert client.get(path, headers=tokens["stranger"]).status_code == 404
        assert "&lt;s&gt;" in client.get(page, headers=tokens["viewer"]).text
        runs = client.get("/", headers=tokens["viewer"]).text
        assert f'href="{page}"' in runs and f"/jobs/{job}" not in runs, "one row"
        assert f"/jobs/{job}" in client.get("/?find=lr", headers=tokens["viewer"]).text
        assert client.get("/v1/training/jobs?alone=1", headers=tokens["user"]).json()["jobs"] == []
        assert line["id"] not in client.get("/", headers=tokens["stranger"]).text
        assert client.get("/v1/sets", headers=tokens["stranger"]).json() == {"sets": []}
        assert [one["id"] for one in client.get("/v1/sets?find=lr", headers=tokens["user"]).json()["sets"]] == [
            line["id"]
        ]
        assert client.post(f"{page}/cancel", headers=tokens["viewer"]).status_code == 403
        assert client.post(f"/v1{page}/cancel", headers=tokens["stranger"]).status_code == 404
        assert client.post(f"/v1{page}/cancel", headers=tokens["user"]).json()["set"]["status"] == "cancelling"
        assert client.post(f"{page}/cancel", headers=tokens["user"]).status_code == 303
    assert store.list_sets(db)[0].cancel_at is not None


def test_a_project_submits_a_set_only_to_what_was_granted(
    db: Database, tmp_path: Path, tokens: dict[str, dict[str, str]]
) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    matrix = {"target": ["lambda", f"ssh:{tmp_path}/hosts.yaml"]}
    with TestClient(app, base_url=BASE, client=LOCAL) as client:
        for body in (BODY, {**BODY, "command": ["x"], "matrix": matrix}):
            assert client.post("/v1/sets", json=body, headers=tokens["user"]).status_code == 403
    assert store.list_sets(db) == []
