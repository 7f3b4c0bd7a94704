"""What a server does once so that its requests need not."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster.store.database import Database
from trainmaster.web import app as server
from trainmaster.web.app import create_app
from trainmaster.web.sign_in.local_access import LocalAccess
from web.conftest import BASE, LOCAL

WARM = """
import sys
from trainmaster.core.config import presets
from trainmaster.web.app import warm_up
warm_up()
loaded = set(sys.modules)
presets.families()
print("trainmaster.cluster.health.history" in loaded, set(sys.modules) == loaded, *sorted(loaded))
"""


def test_a_warm_server_has_imported_what_its_pages_import() -> None:
    said = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, check=True).stdout.split()
    assert said[:2] == ["True", "True"]
    assert {f"trainmaster.targets.{name}" for name in ("slurm", "kubernetes", "lambda_cloud", "ssh")} <= set(said)


def test_a_server_asks_for_its_pages_with_the_token_of_its_user(db: Database, tmp_path: Path) -> None:
    story = samples.completed(db)
    token = LocalAccess(f"tm_{'a' * 43}")
    app = create_app(db, tmp_path, reconcile=False, require_token=True, local=token)
    statuses = asyncio.run(server._ask_pages(app))
    pages = {path.partition("?")[0] for path in statuses}
    assert {"/", "/queue", "/nodes", "/cost", "/settings", "/compare", "/v1/budgets", f"/jobs/{story.id}"} <= pages
    assert set(statuses.values()) == {200}
    measured = [sample.labels for metric in app.state.meter.collect() for sample in metric.samples]
    assert not any("path" in labels for labels in measured), "nobody asked"
    assert db.kept, "the sums of costs are there before the first person asks for them"


@pytest.fixture
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.proof
@pytest.mark.usefixtures("threshold")
def test_a_page_of_a_thousand_rows_is_made_without_a_pass_of_the_collector(db: Database, tmp_path: Path) -> None:
    gc.set_threshold(700)
    with TestClient(create_app(db, tmp_path, reconcile=False), base_url=BASE, client=LOCAL):
        gc.collect()
        before = gc.get_stats()[0]["collections"]
        kept = [[number] for number in range(7_000)]
        assert gc.get_stats()[0]["collections"] == before and len(kept) == 7_000
