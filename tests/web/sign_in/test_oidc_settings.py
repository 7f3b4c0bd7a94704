"""The settings of the sign-in by OpenID Connect: which claims give which role, and the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.roles import Role
from trainmaster.core.schema import build
from trainmaster.web.sign_in.settings import VARIABLE, Grant, Settings, find_grants, load

ROLES = [{"claim": "groups", "value": "ops", "role": "admin"}]


def test_grants() -> None:
    def find(claims: dict[str, Any], *rules: dict[str, Any]) -> list[tuple[str, str | None]]:
        parsed = build(Settings, {**MINIMAL, "roles": list(rules)}).roles
        return [(grant.role.value, grant.project) for grant in find_grants(parsed, claims)]

    lab = {"claim": "groups", "value": "lab", "role": "user", "project": "lab"}
    assert find({"groups": ["lab"]}, lab) == [("user", "lab")] and find({"groups": "lab"}, lab) == [("user", "lab")]
    for wrong in (
        {},
        {"groups": "labs"},
        {"groups": {"lab": 1}},
        {"groups": None},
        {"groups": [["lab"]]},
        {"groups": 7},
    ):
        assert find(wrong, lab) == []
    nested = {**lab, "claim": "realm_access.roles"}
    assert (
        find({"realm_access": {"roles": ["lab"]}}, nested) == [("user", "lab")]
        and find({"realm_access": 7}, nested) == []
    )
    url = {**lab, "claim": "https://example.org/groups"}
    assert find({"https://example.org/groups": ["lab"]}, url) == [("user", "lab")]
    mail = {"claim": "email", "value": "a@b", "role": "admin"}
    assert find({"email": "a@b"}, mail) == [] == find({"email": "a@b", "email_verified": False}, mail)
    assert find({"email": "a@b", "email_verified": True}, mail) == [("admin", None)]
    both = {"groups": ["lab", "all"]}
    assert find(both, lab, {**lab, "role": "viewer"}) == [("user", "lab")], "the highest of a project"
    everywhere = {"claim": "groups", "value": "all", "role": "viewer"}
    assert find(both, lab, everywhere) == [("viewer", None), ("user", "lab")]
    assert find(both, lab, {**everywhere, "role": "admin"}) == [("admin", None)]
    assert find_grants((), both) == () and Grant(role=Role.USER, project=None).project is None


MINIMAL = {"issuer": "https://a.example", "client_id": "c", "url": "https://b.example", "roles": ROLES}


def test_the_file_of_settings(tmp_path: Path) -> None:
    file, secret = tmp_path / "oidc.yaml", tmp_path / "secret"
    file.write_text(json.dumps(MINIMAL))
    assert load(file, {}).secret is None and load(file, {VARIABLE: "s-1"}).secret == "s-1"
    file.write_text(json.dumps({**MINIMAL, "client_secret_file": "secret"}))
    with pytest.raises(UsageError, match="cannot be read"):
        load(file, {})
    secret.write_text("s-2\n")
    client = load(file, {VARIABLE: "s-1"})
    assert (
        client.secret == "s-2"
        and "s-2" not in repr(client)
        and client.settings.redirect_uri == "https://b.example/login/oidc/callback"
    )
    faults = {
        "issuer": "http://a.example", "url": "https://b.example/path", "scopes": ["email"], "roles": [],
        "client_secret": "TOP", "session_hours": 48,
    }  # fmt: skip
    for name, value in faults.items():
        file.write_text(json.dumps({**MINIMAL, name: value}))
        with pytest.raises(SpecError, match=name) as error:
            load(file, {})
        assert "TOP" not in str(error.value)
