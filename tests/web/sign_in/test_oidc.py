"""Sign-in by OpenID Connect: roles by claims, the session and its end, tokens of one's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from pages import samples
from trainmaster.store import audit, people, tables, tokens
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.sign_in.openid import SECRET, HostileProvider, reply, sign_in

pytestmark = pytest.mark.spawns  # a provider on a socket


def test_sign_in_see_and_sign_out(client: TestClient, db: Database, provider: HostileProvider) -> None:
    mine, other = samples.completed(db, project="lab"), samples.completed(db, project="other")
    page = client.get("/login?next=/jobs/7").text
    assert 'href="/login/oidc?next=/jobs/7"' in page and 'name="token"' in page
    done = sign_in(client, provider, after="/settings")
    assert done.status_code == 200 and 'content="0; url=/settings"' in done.text
    (session, forgotten) = done.headers.get_list("set-cookie")
    assert session.startswith("trainmaster=tm_session_") and "HttpOnly" in session and "SameSite=strict" in session
    assert "Max-Age=28800" in session and forgotten.startswith('trainmaster-oidc="";')
    assert client.get(f"/jobs/{mine.id}").status_code == 200 and client.get(f"/jobs/{other.id}").status_code == 404
    assert client.get("/v1/me").json() == {"name": "ann@example.org", "role": "user", "project": "lab"}
    shown = client.get("/settings").text
    assert f"signed in by {provider.url} until" in shown and "ann@example.org" in shown
    secret = client.cookies["trainmaster"]
    header = {"Authorization": f"Bearer {secret}"}
    client.cookies.clear()
    assert client.get("/v1/me", headers=header).status_code == 401, "a session is of a browser, not a token"
    client.cookies["trainmaster"] = secret
    assert client.post("/logout", headers={"Origin": "https://evil.example"}).status_code == 403
    assert client.post("/logout").status_code == 303
    client.cookies["trainmaster"] = secret
    assert client.get("/v1/me").json()["error"]["code"] == "session_over", (
        "ended on the server, not only in the browser"
    )
    assert client.get("/").headers["location"].startswith("/login?next=")
    entries = [(entry.who, entry.action, entry.subject) for entry in audit.list_audit(db)]
    who = "ann@example.org"
    assert entries == [(who, "session.end", f"person:{who}"), (who, "session.start", f"person:{who}")]


def test_nothing_secret_is_kept_or_shown(client: TestClient, db: Database, provider: HostileProvider) -> None:
    left = client.get("/login/oidc")
    cookie, back = client.cookies["trainmaster-oidc"], provider.authorize(left.headers["location"])
    done = client.get("/login/oidc/callback", params=back)
    verifier, secret = provider.forms[-1]["code_verifier"], client.cookies["trainmaster"]
    assert verifier not in left.headers["location"] + cookie + done.text
    with db.read() as conn:
        rows = [
            str(tuple(row))
            for name in ("people", "sessions", "audit")
            for row in conn.execute(tables.metadata.tables[name].select())
        ]
    everything = " ".join(rows) + done.text + client.get("/settings").text
    for hidden in (SECRET, verifier, back["code"], secret, "access-token-of-ann"):
        assert hidden not in everything
    assert people.digest(secret) in everything


def test_roles_follow_the_claims_at_each_sign_in(client: TestClient, db: Database, provider: HostileProvider) -> None:
    provider.claims["groups"] = ["lab", "guests"]
    sign_in(client, provider)
    first = client.cookies["trainmaster"]
    assert '<option value="user lab" selected>' in client.get("/settings").text
    assert client.post("/settings/project", data={"grant": "viewer open"}).status_code == 303
    assert client.get("/v1/me").json()["project"] == "open"
    for grant in ("admin ", "user open", "king lab", "user other"):
        assert client.post("/settings/project", data={"grant": grant}).status_code == 403, grant
    assert client.post("/settings/project", data={"grant": "user lab"}).status_code == 303, "also a viewer goes back"
    assert client.get("/v1/me").json()["role"] == "user"
    client.cookies.clear()
    provider.claims["groups"] = ["ops"]
    sign_in(client, provider)
    assert client.get("/v1/me").json() == {"name": "ann@example.org", "role": "admin", "project": None}
    second = client.cookies["trainmaster"]
    client.cookies.clear()
    client.cookies["trainmaster"] = first
    assert client.get("/v1/me").status_code == 401, "its role is no longer granted"
    provider.claims["groups"] = []
    client.cookies.clear()
    refused = sign_in(client, provider)
    assert refused.status_code == 403 and "ann@example.org has no role" in refused.text
    client.cookies["trainmaster"] = second
    assert client.get("/v1/me").status_code == 401


def test_a_session_ends_by_itself_and_by_an_operator(
    client: TestClient, db: Database, provider: HostileProvider
) -> None:
    provider.claims["groups"] = ["ops"]
    sign_in(client, provider)
    (session,) = people.list_sessions(db, at=datetime.now(UTC), limit=9)
    assert timedelta(hours=7.9) < session.expires_at - datetime.now(UTC) <= timedelta(hours=8)
    page = client.get("/settings").text
    assert "End the session of ann@example.org" in page and people.is_live(db, session.id, at=datetime.now(UTC))
    with db.write() as conn:
        conn.execute(update(tables.sessions).values(expires_at=datetime.now(UTC)))
    assert client.get("/v1/me").status_code == 401 and not people.is_live(db, session.id, at=datetime.now(UTC))
    sign_in(client, provider)
    (session,) = people.list_sessions(db, at=datetime.now(UTC), limit=9)
    assert client.post("/settings/sessions/end", data={"id": str(session.id)}).status_code == 303
    assert client.get("/v1/me").status_code == 401
    assert client.post("/settings/sessions/end", data={"id": "1"}).status_code == 401


def test_tokens_of_ones_own_end_with_the_sign_ins(client: TestClient, db: Database, provider: HostileProvider) -> None:
    sign_in(client, provider)
    made = client.post("/settings/own-tokens", data={"name": "ann-laptop"})
    secret = re.search(r'id="secret">(tm_[^<]+)<', made.text)
    assert made.status_code == 200 and secret is not None
    header = {"Authorization": f"Bearer {secret[1]}"}

    def me() -> int:
        client.cookies.clear()
        return client.get("/v1/me", headers=header).status_code

    assert me() == 200 and client.get("/v1/me", headers=header).json()["project"] == "lab"
    assert client.post("/settings/own-tokens", data={"name": "more"}, headers=header).status_code == 403
    provider.claims = {"sub": "u-9", "email": "eve@example.org", "groups": ["lab"]}
    sign_in(client, provider)
    assert "ann-laptop" not in client.get("/settings").text
    assert client.post("/settings/own-tokens/revoke", data={"name": "ann-laptop"}).status_code == 404
    month = datetime.now(UTC) - tokens.PERSONAL
    with db.write() as conn:
        conn.execute(update(tables.people).values(signed_in_at=month))
    assert me() == 401, "nobody has seen them for a month"
    for groups, status in ((["lab"], 200), (["guests"], 401), (["ops"], 200), ([], 401), (["lab"], 200)):
        client.cookies.clear()
        provider.claims = {"sub": "u-1", "email": "ann@example.org", "groups": groups}
        sign_in(client, provider)
        assert me() == status, groups
        row = tokens.find_by_name(db, "ann-laptop")
        assert row is not None and tokens.is_live(db, row.id) == (status == 200)
    sign_in(client, provider)
    assert "Revoke your token ann-laptop" in client.get("/settings").text
    assert client.post("/settings/own-tokens/revoke", data={"name": "ann-laptop"}).status_code == 303
    assert me() == 401
    acts = [(entry.who, entry.action) for entry in audit.list_audit(db, subject="token:ann-laptop")]
    assert acts == [("ann@example.org", "token.revoke"), ("ann@example.org", "token.create")]


def test_names_of_people(client: TestClient, db: Database, provider: HostileProvider) -> None:
    def name(**claims: Any) -> str:
        client.cookies.clear()
        provider.claims = {"groups": ["lab"], **claims}
        assert sign_in(client, provider).status_code == 200
        return str(client.get("/v1/me").json()["name"])

    assert name(sub="u-1", email="ann@example.org") == "ann@example.org"
    assert name(sub="u-2", email="ann@example.org").startswith("ann@example.org#"), "the name is of another person"
    assert name(sub="u-1", email="changed@example.org") == "ann@example.org", "the audit log knows them by it"
    assert name(sub="u-3", email="boss@example.org", email_verified=False) == "u-3@127.0.0.1"
    assert name(sub="u-4") == "u-4@127.0.0.1" and name(sub="u-5", email="local") == "local@127.0.0.1"
    assert len(name(sub="u-6", email="x" * 300 + "@example.org")) == 63
    hostile = name(sub="u-7", email="<script>alert(1)</script>\x1b[31m@x")
    assert "\x1b" not in hostile and "<script>alert" not in client.get("/settings").text


def test_claims_of_userinfo(make: Callable[..., TestClient], provider: HostileProvider) -> None:
    client = make(userinfo=True)
    provider.claims.pop("groups")
    assert sign_in(client, provider).status_code == 200 and "/userinfo" in provider.asked
    provider.answers["/userinfo"] = lambda: reply({"sub": "u-2", "groups": ["ops"]})
    refused = sign_in(client, provider)
    assert refused.status_code == 502 and "of another person" in refused.text


def test_post_and_basic_carry_the_secret(make: Callable[..., TestClient], provider: HostileProvider) -> None:
    assert sign_in(make(), provider).status_code == 200 and "client_secret" not in provider.forms[-1]
    provider.metadata = {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
    assert sign_in(make(), provider).status_code == 200 and provider.forms[-1]["client_secret"] == SECRET


def test_without_settings_there_is_no_such_sign_in(
    db: Database, tmp_path: Path, make: Callable[..., TestClient], provider: HostileProvider
) -> None:
    client = make()
    sign_in(client, provider)
    secret = client.cookies["trainmaster"]
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as plain:
        assert plain.get("/login/oidc").status_code == 404 and "/login/oidc" not in plain.get("/login").text
        plain.cookies["trainmaster"] = secret
        assert plain.get("/v1/me").status_code == 401, "a session of a sign-in that was switched off"
