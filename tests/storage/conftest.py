"""A store of each kind, empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.storage import Store, open_store


@pytest.fixture(params=["folder", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "store")
    return request.getfixturevalue("s3_store")


@pytest.fixture
def s3_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    server = request.getfixturevalue("s3")
    server.use(monkeypatch)
    return open_store(f"s3://{server.bucket}/{tmp_path.name}/any")
