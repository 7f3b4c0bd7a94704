"""Sign-in in a real browser, through a real server process, at a provider that others wrote (oidc-provider-mock)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from pages import samples
from sshd import free_port
from trainmaster.store.migrate import open_database
from web.test_pages_browser import violations

SECRET = "secret-of-the-client"
PEOPLE = (
    {"sub": "ann", "email": "ann@example.org", "email_verified": True, "groups": ["lab"]},
    {"sub": "eve", "email": "eve@example.org", "email_verified": True, "groups": []},
    {"sub": "root", "email": "root@example.org", "email_verified": True, "groups": ["ops"]},
)


@contextlib.contextmanager
def running(words: list[str], url: str, log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers at this address."""
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env={**os.environ, **env})
    try:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(url, timeout=5).close()
                break
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The server as `localhost` and the provider as 127.0.0.1: for a browser these are two sites."""
    if importlib.util.find_spec("oidc_provider_mock") is None:
        pytest.skip("no provider: pip install oidc-provider-mock")
    issuer, ours = f"http://127.0.0.1:{free_port()}", f"http://localhost:{free_port()}"
    samples.completed(open_database(tmp_path / "trainmaster.db"), project="lab")
    (tmp_path / "client-secret").write_text(SECRET)
    settings = {
        "issuer": issuer, "client_id": "trainmaster", "client_secret_file": "client-secret", "url": ours,
        "label": "Sign in with Example", "roles": [
            {"claim": "groups", "value": "lab", "role": "user", "project": "lab"},
            {"claim": "groups", "value": "ops", "role": "admin"},
        ],
    }  # fmt: skip
    (tmp_path / "oidc.yaml").write_text(json.dumps(settings))
    port = str(urlsplit(issuer).port)
    provider = [sys.executable, "-m", "oidc_provider_mock", "--port", port, "--require-nonce", "true"]
    for person in PEOPLE:
        provider += ["--user-claims", json.dumps(person)]
    server = [sys.executable, "-m", "trainmaster", "serve", "--home", str(tmp_path), "--no-reconcile"]
    server += ["--port", str(urlsplit(ours).port), "--oidc", str(tmp_path / "oidc.yaml")]
    known = f"{issuer}/.well-known/openid-configuration"
    with (
        running(provider, known, tmp_path / "provider.log"),
        running(server, f"{ours}/healthz", tmp_path / "server.log"),
    ):
        yield ours, issuer


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab that reaches this machine alone (the provider's page wants a style sheet from elsewhere)."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})

    def pass_on(route: Route) -> None:
        local = urlsplit(route.request.url).hostname in ("127.0.0.1", "localhost")
        route.continue_() if local else route.abort()

    context.route("**/*", pass_on)
    yield context.new_page()
    context.close()


def agree(page: Page, person: str) -> None:
    """Press the button of the login page, then the person's at the provider."""
    page.get_by_role("link", name="Sign in with Example").click()
    page.wait_for_url(re.compile(r"^http://127\.0\.0\.1:"))
    page.get_by_role("button", name=person, exact=True).first.click()


@pytest.mark.matrix(one_in=2, of="sign-in with a browser")
def test_sign_in_see_the_runs_sign_out(places: tuple[str, str], page: Page, tmp_path: Path) -> None:
    ours, issuer = places
    page.goto(f"{ours}/settings")
    expect(page).to_have_url(f"{ours}/login?next=%2Fsettings")
    assert violations(page) == []
    agree(page, "ann")
    expect(page).to_have_url(f"{ours}/settings")
    expect(page.get_by_text(f"signed in by {issuer} until")).to_be_visible()
    page.goto(ours)
    expect(page.get_by_role("link", name="llama").first).to_be_visible()
    (cookie,) = [each for each in page.context.cookies() if each["name"] == "trainmaster"]
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["value"].startswith("tm_session_")
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(f"{ours}/login")
    page.goto(ours)
    expect(page).to_have_url(f"{ours}/login?next=%2F")
    page.context.add_cookies([cookie])
    page.goto(ours)
    expect(page).to_have_url(f"{ours}/login?next=%2F")
    agree(page, "eve")
    expect(page.get_by_text("eve@example.org has no role on this server.")).to_be_visible()
    assert violations(page) == []
    agree(page, "root")
    expect(page).to_have_url(f"{ours}/")
    page.goto(f"{ours}/settings#audit")
    expect(page.get_by_role("cell", name="session.start")).to_have_count(2)
    expect(page.get_by_role("button", name="End the session of root@example.org")).to_be_visible()
    # The boxes of a webhook's topics are smaller than 24 px with or without this sign-in.
    assert [each for each in violations(page) if 'name="topic"' not in each] == []
    kept = "".join(file.read_text(errors="replace") for file in tmp_path.glob("*.log"))
    assert SECRET not in kept and cookie["value"] not in kept
