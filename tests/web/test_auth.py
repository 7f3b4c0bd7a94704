"""Who is let in, and for what: tokens by role and project, loopback, the login page, guessing, the trail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster.control import known_targets
from trainmaster.core.errors import UsageError
from trainmaster.core.schema import to_plain
from trainmaster.store import attempts, audit, costs, tokens
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.tokens import Role
from trainmaster.web.app import create_app
from trainmaster.web.auth import COOKIE, PUBLIC, may_bind
from trainmaster.web.rate_limit import Limiter, Rate
from web.conftest import BASE, LOCAL
from web.furnished import JOBS, issue


@pytest.fixture
def closed(db: Database, tmp_path: Path) -> TestClient:
    """A server that asks everybody for a token."""
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    return TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False)


def outcome(answer: Any) -> tuple[int, str | None]:
    body = answer.json() if answer.headers.get("content-type") == "application/json" else {}
    return answer.status_code, body.get("error", {}).get("code")


def test_every_path_of_the_document_is_closed_unless_it_is_said_to_be_open(closed: TestClient) -> None:
    paths = closed.get("/v1/openapi.json").json()["paths"]
    assert len(paths) > 25
    for path, operations in paths.items():
        for method in operations:
            answer = closed.request(method, path.replace("{uuid}", "x").replace("{n}", "1"))
            assert (answer.status_code == 401) is (path not in PUBLIC), (method, path)


@pytest.mark.parametrize("path", ["/", "/jobs/x", "/v1/nothing", "/nothing", "/jobs/x/report", "//v1/me"])
def test_what_is_not_in_the_document_is_closed_too(closed: TestClient, path: str) -> None:
    assert closed.get(path).status_code in (303, 401)


@pytest.mark.parametrize(
    "host", ["127.0.0.1/healthz?", "127.0.0.1/static/", "127.0.0.1/healthz#", "localhost/login?x="]
)
def test_a_host_header_does_not_open_a_path(closed: TestClient, db: Database, host: str) -> None:
    samples.pending(db)
    for path in ("/v1/nodes", JOBS, "/metrics", "/", "/v1/tokens"):
        answer = closed.get(path, headers={"host": host})
        assert answer.status_code in (303, 401, 421), (path, answer.text)


def test_a_token_is_kept_as_its_hash_alone(db: Database) -> None:
    token = issue(db, "ann", Role.ADMIN)["Authorization"].removeprefix("Bearer ")
    assert tokens.SHAPE.fullmatch(token)
    with db.read() as conn:
        dump = str(conn.exec_driver_sql("SELECT * FROM tokens").all())
    assert token not in dump
    assert tokens.digest(token) in dump
    assert tokens.find_token(db, token) == tokens.find_by_name(db, "ann")


@pytest.mark.parametrize(
    "header", ["Bearer", "Bearer x", "Bearer tm_" + "A" * 43, "Basic dG06eA==", "tm_" + "A" * 43, "Bearer \x00"]
)
def test_a_wrong_token_is_refused_even_over_loopback(client: TestClient, header: str) -> None:
    answer = client.get(JOBS, headers={"Authorization": header})
    assert outcome(answer) == (401, "bad_token")
    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_a_revoked_token_is_refused_at_once(closed: TestClient, db: Database) -> None:
    admin, ann = issue(db, "root", Role.ADMIN), issue(db, "ann", Role.VIEWER)
    assert closed.get(JOBS, headers=ann).status_code == 200
    assert closed.delete("/v1/tokens/ann", headers=admin).status_code == 204
    assert outcome(closed.get(JOBS, headers=ann)) == (401, "bad_token")
    assert closed.delete("/v1/tokens/ann", headers=admin).status_code == 204  # a second time changes nothing
    assert [row.action for row in audit.list_audit(db, subject="token:ann")] == ["token.revoke"]


def test_a_viewer_reads_a_user_submits_an_admin_rules(closed: TestClient, db: Database) -> None:
    spec = to_plain(samples.spec(target="lambda"))
    known_targets.grant(db, "lambda", spec["project"], user=None, by="local")
    hook = {"url": "https://hooks.example.org/x"}
    asked = [
        ("GET", JOBS, None), ("POST", JOBS, spec), ("PUT", "/v1/budgets/research/month", {"cap_cents": 5}),
        ("POST", "/v1/webhooks", hook), ("GET", "/v1/audit", None), ("GET", "/v1/tokens", None),
        ("POST", "/v1/tokens", {"name": "x", "role": "viewer"}),
    ]  # fmt: skip
    expected = {Role.VIEWER: [200] + [403] * 6, Role.USER: [200, 201] + [403] * 5,
                Role.ADMIN: [200, 201, 200, 201, 200, 200, 201]}  # fmt: skip
    for role, statuses in expected.items():
        headers = issue(db, f"a-{role}", role)
        got = [closed.request(method, path, json=body, headers=headers).status_code for method, path, body in asked]
        assert got == statuses, role


def test_a_token_of_a_project_sees_and_changes_that_project_alone(closed: TestClient, db: Database) -> None:
    ours, theirs = samples.pending(db, project="research"), samples.pending(db, project="infra")
    user, admin = issue(db, "u", Role.USER, "research"), issue(db, "a", Role.ADMIN, "research")
    assert [job["id"] for job in closed.get(JOBS, headers=user).json()["jobs"]] == [ours.id]
    assert outcome(closed.get(f"{JOBS}?project_id=infra", headers=user)) == (403, "forbidden")
    # Of a job of another project one does not even learn that it is there.
    for path in ("", "/details", "/events", "/logs", "/artifacts", "/checks", "/cost"):
        assert outcome(closed.get(f"{JOBS}/{theirs.id}{path}", headers=user)) == (404, "not_found"), path
    assert outcome(closed.post(f"{JOBS}/{theirs.id}/cancel", headers=user)) == (404, "not_found")
    assert outcome(closed.post(JOBS, json=to_plain(samples.spec(project="infra")), headers=user)) == (403, "forbidden")
    assert closed.get(f"/jobs/{theirs.id}", headers=user).status_code == 404
    assert closed.post(f"{JOBS}/{ours.id}/cancel", headers=user).status_code == 200
    for path in ("/v1/audit", "/metrics"):
        assert outcome(closed.get(path, headers=admin)) == (403, "forbidden")
    assert outcome(closed.post("/v1/tokens", json={"name": "x", "role": "admin"}, headers=admin)) == (403, "forbidden")
    mine = {"name": "y", "role": "user", "project": "research"}
    assert closed.post("/v1/tokens", json=mine, headers=admin).status_code == 201
    assert outcome(closed.put("/v1/budgets/infra/month", json={"cap_cents": 1}, headers=admin)) == (403, "forbidden")


def test_a_finished_job_is_deleted_by_a_user_of_its_project_alone(closed: TestClient, db: Database) -> None:
    story = samples.completed(db, project="lab")
    with db.write() as conn:
        attempts.mark_released(conn, story.attempt, at=story.at)
    path = f"{JOBS}/{story.id}"
    user = issue(db, "u", Role.USER, "lab")
    for name, role, project, status in (("v", Role.VIEWER, "lab", 403), ("s", Role.USER, "other", 404)):
        assert closed.delete(path, headers=issue(db, name, role, project)).status_code == status
    with db.write() as conn:
        costs.set_budget(conn, "lab", "month", 10_000, at=story.at)
        costs.set_price(conn, story.attempt, 100.0)
    assert outcome(closed.delete(path, headers=user)) == (403, "forbidden"), "a user cannot free a budget"
    with db.write() as conn:
        costs.remove_budget(conn, "lab", "month")
    running = samples.pending(db, project="lab")
    assert outcome(closed.delete(f"{JOBS}/{running.id}", headers=user)) == (409, "still_open")
    assert closed.delete(path, headers=user).status_code == 204 and find_job(db, story.id) is None
    assert closed.delete(path, headers=user).status_code == 404 and find_job(db, running.id) is not None


def test_every_change_leaves_who_made_it(closed: TestClient, db: Database) -> None:
    ann = issue(db, "ann", Role.ADMIN)
    job = closed.post(JOBS, json=to_plain(samples.spec()), headers=ann).json()
    assert job["submitted_by"] == "ann"
    closed.post(f"{JOBS}/{job['id']}/cancel", headers=ann)
    closed.put("/v1/budgets/research/month", json={"cap_cents": 5}, headers=ann)
    closed.delete("/v1/budgets/research/month", headers=ann)
    made = closed.post("/v1/webhooks", json={"url": "https://hooks.example.org/x"}, headers=ann).json()
    closed.patch(f"/v1/webhooks/{made['id']}", json={"enabled": False}, headers=ann)
    closed.delete(f"/v1/webhooks/{made['id']}", headers=ann)
    entries = closed.get("/v1/audit", headers=ann).json()["entries"]
    assert {entry["who"] for entry in entries} == {"ann"}
    actions = " ".join(entry["action"] for entry in reversed(entries))
    assert actions.startswith("job.submit job.cancel budget.set budget.remove")
    assert actions.endswith("webhook.create webhook.disable webhook.remove")
    assert made["signing_key"] not in str(entries)


@pytest.mark.parametrize("query", ["token=x", "access_token=x", "Authorization=x", "model_id=tm_" + "A" * 43])
def test_a_token_in_an_address_is_refused(client: TestClient, query: str) -> None:
    assert outcome(client.get(f"/v1/training/evaluations?{query}")) == (400, "token_in_query")


def test_an_address_of_many_parts_is_read(client: TestClient) -> None:
    assert outcome(client.get(JOBS + "?" + "&".join(f"p{number}=1" for number in range(3000)))) == (
        400,
        "unknown_parameter",
    )


@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        (("203.0.113.7", 1), {}),
        (LOCAL, {"X-Forwarded-For": "203.0.113.7"}),
        (LOCAL, {"X-Forwarded-For": "127.0.0.1"}),
        (LOCAL, {"Forwarded": "for=127.0.0.1"}),
        (LOCAL, {"Via": "1.1 proxy"}),
    ],
)
def test_what_came_from_elsewhere_is_not_loopback(
    db: Database, tmp_path: Path, peer: tuple[str, int], headers: dict[str, str]
) -> None:
    client = TestClient(create_app(db, tmp_path, reconcile=False), base_url=BASE, client=peer)
    assert outcome(client.get(JOBS, headers=headers)) == (401, "no_token")


def test_a_server_binds_elsewhere_only_where_a_token_exists(db: Database) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        may_bind(db, host)
    with pytest.raises(UsageError, match="token create"):
        may_bind(db, "0.0.0.0")
    with pytest.raises(UsageError, match="not an address"):
        may_bind(db, "example.org")
    issue(db, "ann", Role.VIEWER)
    may_bind(db, "0.0.0.0")


def test_a_browser_is_led_to_the_login_and_back(closed: TestClient, db: Database) -> None:
    story = samples.completed(db)
    token = issue(db, "ann", Role.VIEWER)["Authorization"].removeprefix("Bearer ")
    led = closed.get(f"/jobs/{story.id}")
    assert (led.status_code, led.headers["location"]) == (303, f"/login?next=%2Fjobs%2F{story.id}")
    assert 'type="password"' in closed.get(led.headers["location"]).text
    refused = closed.post("/login", data={"token": "tm_" + "A" * 43, "next": "/"})
    assert refused.status_code == 401
    assert COOKIE not in refused.cookies
    good = closed.post("/login", data={"token": token, "next": f"/jobs/{story.id}"})
    assert (good.status_code, good.headers["location"]) == (303, f"/jobs/{story.id}")
    flags = good.headers["set-cookie"].lower()
    assert all(word in flags for word in ("httponly", "samesite=strict", "path=/"))
    page = closed.get(f"/jobs/{story.id}")
    assert page.status_code == 200
    assert "Sign out</button>" in page.text and ">ann</span>" in page.text
    assert token not in page.text
    assert closed.post(f"/jobs/{story.id}/cancel").status_code == 403  # a viewer
    assert closed.post("/logout").status_code == 303
    assert closed.get("/").status_code == 303


@pytest.mark.parametrize("after", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:x", ""])
def test_the_login_leads_to_no_other_site(closed: TestClient, db: Database, after: str) -> None:
    token = issue(db, "ann", Role.VIEWER)["Authorization"].removeprefix("Bearer ")
    assert closed.post("/login", data={"token": token, "next": after}).headers["location"] == "/"


def test_guessing_is_slowed_down(closed: TestClient, db: Database) -> None:
    good = issue(db, "ann", Role.VIEWER)
    guesses = [closed.get(JOBS, headers={"Authorization": "Bearer tm_" + "A" * 43}) for _ in range(21)]
    assert {answer.status_code for answer in guesses[:20]} == {401}
    assert outcome(guesses[20]) == (429, "too_many")
    assert int(guesses[20].headers["retry-after"]) >= 1
    assert closed.post("/login", data={"token": "x"}).status_code == 429
    # Not so the right one: whoever could lock out an address would lock out everybody behind its proxy.
    assert closed.get(JOBS, headers=good).status_code == 200


def test_asking_too_often_is_refused_for_one_caller_alone(db: Database, tmp_path: Path) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True, rate=Rate(per_s=0.001, burst=3))
    client = TestClient(app, base_url=BASE, client=LOCAL)
    ann, bob = issue(db, "ann", Role.VIEWER), issue(db, "bob", Role.VIEWER)
    assert [client.get("/v1/me", headers=ann).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert client.get("/v1/me", headers=bob).json() == {"name": "bob", "role": "viewer", "project": None}


def test_a_bucket_fills_again() -> None:
    now = 0.0
    limiter = Limiter(Rate(per_s=2.0, burst=2), clock=lambda: now)
    assert [limiter.take("a") for _ in range(3)] == [0.0, 0.0, 0.5]
    assert limiter.take("b") == 0.0
    now = 0.5
    assert limiter.take("a") == 0.0
    assert limiter.take("a") > 0


def test_names_are_given_out_once(client: TestClient) -> None:
    wish = {"name": "ann", "role": "viewer"}
    assert client.post("/v1/tokens", json=wish).status_code == 201
    assert client.delete("/v1/tokens/ann").status_code == 204
    assert outcome(client.post("/v1/tokens", json=wish)) == (409, "name_taken")
    assert outcome(client.post("/v1/tokens", json={**wish, "name": "loopback"})) == (409, "name_taken")
    assert outcome(client.post("/v1/tokens", json={**wish, "role": "god"})) == (422, "bad_request")
