from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainmaster.store.database import Database
from trainmaster.web.app import create_app

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

# Starlette warns that it would rather have httpx2; both serve, and httpx is what this project depends on.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

BASE = "http://127.0.0.1:8470"
LOCAL = ("127.0.0.1", 50_000)  # where a request says that it comes from


@pytest.fixture
def client(db: Database, tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(db, tmp_path, reconcile=False)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        yield client


@pytest.fixture
def any_tab(browser: Browser) -> Iterator[Page]:
    """A tab that fails its test if a script went wrong or the policy refused anything. A refusal is a page too."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()

    def look(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            wrong.append(message.text)

    page.on("console", look)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert wrong == []
