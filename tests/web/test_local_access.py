"""The server's own user: a token in a 0600 file, a link that works once, and nothing for others of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.sign_in.local_access import FILE, open_local_access

BASE = "http://127.0.0.1:8470"


def ask(db: Database, home: Path, *, client: str = "127.0.0.1") -> tuple[TestClient, str, str]:
    local = open_local_access(home)
    app = create_app(db, home, reconcile=False, require_token=True, local=local)
    asked = TestClient(app, base_url=BASE, client=(client, 50_000), follow_redirects=False)
    return asked, local.token, local.link


def test_the_token_of_the_file_is_needed_and_enough(db: Database, tmp_path: Path) -> None:
    client, token, _ = ask(db, tmp_path)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert client.get("/v1/training/jobs").status_code == 401
    bearer = {"Authorization": f"Bearer {token}"}
    me = client.get("/v1/me", headers=bearer).json()
    assert (me["name"], me["role"], me["project"]) == ("local", "admin", None)
    assert open_local_access(tmp_path).token == token, "a restart keeps it"


def test_the_token_of_the_file_is_for_this_machine_alone(db: Database, tmp_path: Path) -> None:
    client, token, link = ask(db, tmp_path, client="192.0.2.7")
    assert client.get("/v1/me", headers={"Authorization": f"Bearer {token}"}).status_code == 401
    assert client.get(link).status_code == 401


def test_the_link_works_once(db: Database, tmp_path: Path) -> None:
    client, _, link = ask(db, tmp_path)
    first = client.get(f"{link}?next=/jobs/x")
    assert first.status_code == 303 and first.headers["location"] == "/jobs/x"
    assert "HttpOnly" in first.headers["set-cookie"] and "SameSite=strict" in first.headers["set-cookie"]
    assert client.get("/").status_code == 200, "the cookie lets the browser in"
    client.cookies.clear()
    assert client.get(link).status_code == 401
    assert client.get("/enter/None").status_code == 401


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_token_that_others_could_read_is_replaced(tmp_path: Path, mode: int) -> None:
    before = open_local_access(tmp_path).token
    (tmp_path / FILE).chmod(mode)
    assert open_local_access(tmp_path).token != before
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
