"""The page of settings: tokens, projects, webhooks and channels with a test of each, audit log; by the API's roles."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster.control.notify.signing import signing_key
from trainmaster.core.roles import Role
from trainmaster.store import audit, known_targets, tokens, webhooks
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.furnished import issue


@pytest.fixture
def closed(db: Database, tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        yield client


def hook(db: Database, project: str | None, url: str, hook_id: str) -> str:
    with db.write() as conn:
        webhooks.insert_webhook(conn, hook_id, url=url, project=project, topics=[], at=samples.T0)
    return hook_id


def test_a_token_is_made_shown_once_and_revoked(client: TestClient, db: Database) -> None:
    made = client.post("/settings/tokens", data={"name": "ann", "role": "user", "project": "lab"})
    secret = re.search(r'id="secret">(tm_[^<]+)<', made.text)
    assert made.status_code == 200 and secret is not None
    row = tokens.find_token(db, secret[1])
    assert row is not None and (row.role, row.project) == (Role.USER, "lab")
    assert "ann" in client.get("/settings").text and secret[1] not in client.get("/settings").text
    again = client.post("/settings/tokens", data={"name": "ann", "role": "user", "project": ""})
    assert again.status_code == 409 and "choose a new one" in again.text and 'value="ann"' in again.text
    hostile = client.post("/settings/tokens", data={"name": '"><script>1</script>', "role": "admin"})
    assert hostile.status_code == 422 and "<script>1" not in hostile.text and "selected>admin" in hostile.text
    for name, role in (("x y", "user"), ("x", "king"), ("", "user")):
        assert client.post("/settings/tokens", data={"name": name, "role": role}).status_code == 422
    assert client.post("/settings/tokens/revoke", data={"name": "ann"}).status_code == 303
    assert tokens.find_token(db, secret[1]) is None
    assert [entry.action for entry in audit.list_audit(db)] == ["token.revoke", "token.create"]
    assert "token.revoke" in client.get("/settings?subject=token:ann").text


@pytest.mark.parametrize("known_by", ["job", "token", "grant"])
def test_a_project_that_nothing_has_is_said(client: TestClient, db: Database, known_by: str) -> None:
    posts = {
        "tokens": {"name": "ann", "role": "user"}, "budgets": {"dollars": "5"}, "shares": {"quota": "1"},
    }  # fmt: skip

    def said(form: str, project: str, **more: str) -> list[str]:
        done = client.post(f"/settings/{form}", data={"project": project, **posts[form], **more})
        assert done.status_code == 200
        return re.findall('<p id="unused">No job has project ([^ ]+) yet', done.text)

    for form in ("budgets", "shares", "tokens"):
        assert said(form, "speach") == ["speach"], "a cap or a share alone makes no project"
    assert said("budgets", "speach") == [], "the token has it now"
    assert said("tokens", "", name="all") == []
    assert said("budgets", "speech") == ["speech"]
    if known_by == "job":
        samples.Story(db, samples.spec(project="speech"), at=samples.T0)
    elif known_by == "token":
        issue(db, "bob", Role.USER, "speech")
    else:
        with db.write() as conn:
            known_targets.put_grant(conn, "pool", "speech", user=None, identity={}, at=samples.T0)
    assert said("budgets", "speech") == said("shares", "speech") == said("tokens", "speech", name="eve") == []
    assert said("budgets", "other", dollars="5") == ["other"] and said("budgets", "other", dollars="none") == []


@pytest.mark.spawns
def test_a_webhook_is_made_tested_and_removed(client: TestClient, db: Database, tmp_path: Path) -> None:
    got: list[tuple[str, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.headers["trainmaster-signature"], body))
            self.send_response(204 if len(got) < 2 else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    file = tmp_path / "notify.yaml"
    file.write_text('allow_hosts: ["127.0.0.1"]\nchannels: {ops: {url: "nonsense://SECRET-OF-OPS"}}\n')
    file.chmod(0o600)
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/x"
        made = client.post("/settings/webhooks", data={"url": url, "topic": ["job.failed", "job.stalled"]})
        with db.read() as conn:
            (row,) = webhooks.list_webhooks(conn)
        assert row.topics == ("job.failed", "job.stalled")
        assert (
            signing_key(tmp_path, row.id) in made.text
            and signing_key(tmp_path, row.id) not in client.get("/settings").text
        )
        good = client.post("/settings/webhooks/test", data={"id": row.id}).text
        assert "The test arrived" in good and b'"topic":"test"' in got[0][1] and got[0][0].startswith("t=")
        bad = client.post("/settings/webhooks/test", data={"id": row.id}).text
        assert "failed: HTTP 500" in bad
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    page = client.get("/settings").text
    assert "ops" in page and "SECRET-OF-OPS" not in page
    tried = client.post("/settings/channels/test", data={"name": "ops"}).text
    assert "The test to ops failed" in tried and "SECRET-OF-OPS" not in tried
    assert client.post("/settings/webhooks/switch", data={"id": row.id, "enabled": "0"}).status_code == 303
    assert '<span class="pill idle">off</span>' in client.get("/settings").text
    assert client.post("/settings/webhooks/remove", data={"id": row.id}).status_code == 303
    refused = client.post("/settings/webhooks", data={"url": "http://169.254.169.254/", "topic": ["job.failed"]})
    assert refused.status_code == 422 and "Nothing was created: " in refused.text
    # What was typed is still there, to be mended.
    assert 'value="http://169.254.169.254/"' in refused.text and 'value="job.failed" checked' in refused.text
    with db.read() as conn:
        assert webhooks.list_webhooks(conn) == []
    assert {entry.action for entry in audit.list_audit(db)} >= {"notify.test", "webhook.create", "webhook.remove"}


def test_each_role_has_its_own_settings(closed: TestClient, db: Database) -> None:
    samples.pending(db, project="lab")
    samples.pending(db, project="victim")
    mine = hook(db, "lab", "https://lab.example.org/x", "11111111-1111-4111-8111-111111111111")
    theirs = hook(db, "victim", "https://victim.example.org/x", "22222222-2222-4222-8222-222222222222")
    issue(db, "spy", Role.USER, "victim")
    assert closed.get("/settings").status_code == 303, "nobody is asked to sign in"
    for role in (Role.VIEWER, Role.USER):
        token = issue(db, f"plain-{role}", role, "lab")
        page = closed.get("/settings", headers=token).text
        assert "Nothing to set" in page and "example.org" not in page and "spy" not in page
        for path, form in (
            ("tokens", "name=x&role=viewer"),
            ("webhooks/test", f"id={mine}"),
            ("channels/test", "name=a"),
        ):
            assert closed.post(f"/settings/{path}", headers=token, content=form).status_code == 403
    token = issue(db, "head-of-lab", Role.ADMIN, "lab")
    page = closed.get("/settings", headers=token).text
    assert "lab.example.org" in page and "victim" not in page and "spy" not in page and "Audit log" not in page
    for path in ("test", "switch", "remove"):
        assert closed.post(f"/settings/webhooks/{path}", headers=token, data={"id": theirs}).status_code == 404
    assert closed.post("/settings/tokens/revoke", headers=token, data={"name": "spy"}).status_code == 404
    for project in ("victim", ""):
        wish = {"name": f"more-{project}", "role": "admin", "project": project}
        assert closed.post("/settings/tokens", headers=token, data=wish).status_code == 403
    assert closed.post("/settings/channels/test", headers=token, data={"name": "ops"}).status_code == 403
    operator = issue(db, "operator", Role.ADMIN)
    page = closed.get("/settings", headers=operator).text
    assert "victim.example.org" in page and "Audit log" in page and "spy" in page
    cross = closed.post(
        "/settings/tokens/revoke", headers={**operator, "origin": "https://evil.example"}, data={"name": "spy"}
    )
    assert cross.status_code == 403 and tokens.find_by_name(db, "spy").revoked_at is None  # type: ignore[union-attr]


def test_what_others_wrote_is_text(client: TestClient, db: Database) -> None:
    with db.write() as conn:
        audit.record(
            conn, who="x", action="job.submit", subject="<img src=x>", detail={"why": "<script>alert(1)</script>"}
        )
    page = client.get("/settings").text
    assert "<img" not in page and "<script>alert" not in page and "&lt;img src=x&gt;" in page
