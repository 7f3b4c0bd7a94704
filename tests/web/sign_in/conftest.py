"""A provider that can be told to misbehave, and servers that let its people in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from trainmaster.core.schema import build
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.sign_in.oidc import SignIn
from trainmaster.web.sign_in.provider import Provider
from trainmaster.web.sign_in.settings import Client, Settings
from web.conftest import BASE, LOCAL
from web.sign_in.openid import CLIENT_ID, SECRET, HostileProvider, hostile_provider

ROLES = [
    {"claim": "groups", "value": "ops", "role": "admin"},
    {"claim": "groups", "value": "lab", "role": "user", "project": "lab"},
    {"claim": "groups", "value": "guests", "role": "viewer", "project": "open"},
]


@pytest.fixture(scope="module")
def shared() -> Iterator[HostileProvider]:
    with hostile_provider() as provider:
        yield provider


@pytest.fixture
def provider(shared: HostileProvider) -> HostileProvider:
    url, key = shared.url, shared.key
    shared.__init__(url)  # type: ignore[misc]
    shared.key, shared.published = key, [key.as_dict(private=False)]
    return shared


def settings(provider: HostileProvider, **changes: Any) -> Settings:
    return build(Settings, {"issuer": provider.url, "client_id": CLIENT_ID, "url": BASE, "roles": ROLES, **changes})


@pytest.fixture
def make(db: Database, tmp_path: Path, provider: HostileProvider) -> Iterator[Callable[..., TestClient]]:
    opened: list[TestClient] = []

    def start(*, timeout_s: float = 10.0, **changes: Any) -> TestClient:
        client = Client(settings=settings(provider, **changes), secret=SECRET)
        ways = SignIn(client, tmp_path, provider=Provider(client, timeout_s=timeout_s))
        app = create_app(db, tmp_path, reconcile=False, require_token=True, sign_in=ways)
        opened.append(TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False))
        return opened[-1].__enter__()

    yield start
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def client(make: Callable[..., TestClient]) -> TestClient:
    return make()
