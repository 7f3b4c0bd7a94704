"""A comparison that can be read and passed on: short hashes, one run that diverged, the whole choice in the link."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.states import Stage, Status
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.furnished import read_page, serving, wait_until

from .conftest import TestClient


def run(db: Database, name: str, losses: list[float], **changes: object) -> str:
    story = samples.Story(db, samples.spec(name=name, **changes)).start().move(Stage.RUNNING)
    told = (Event(phase="STEP", event="metrics", data={"step": n, "loss": y}) for n, y in enumerate(losses, 1))
    return story.tell(told).end_attempt().finish(Status.COMPLETED).id


def test_a_hash_is_short_and_whole_in_its_title(client: TestClient, db: Database) -> None:
    digests = ["0123456789abcdef" * 4, "fedcba9876543210" * 4]
    ids = ",".join(run(db, f"run-{n}", [1.0], workdir=f"sha256:{digest}") for n, digest in enumerate(digests))
    text = read_page(client.get(f"/compare?jobs={ids}&group=workdir"))
    bare = re.sub(r'(title|href|data-name|value|aria-label)="[^"]*"', "", text)
    for digest in digests:
        assert f'<span title="sha256:{digest}">{digest[:12]}…</span>' in text
        assert digest not in bare, "in the table of final values, by groups and in the legend too"


def test_the_link_holds_the_log_scale_and_the_time(client: TestClient, db: Database) -> None:
    ids = ",".join(run(db, f"run-{n}", [1.0, 2.0]) for n in range(2))
    plain, chosen = (client.get(f"/compare?jobs={ids}{more}").text for more in ("", "&log=1&time=1"))
    for name in ("log-scale", "by-time"):
        box = re.search(rf'<input type="checkbox" id="{name}"[^>]*>', chosen)
        assert box is not None and "checked" in box[0] and f'id="{name}" checked' not in plain
    link = re.search(r'id="permalink" href="([^"]+)"', chosen)
    assert link is not None and link[1].endswith("&amp;log=1&amp;time=1")
    assert "log=1" not in plain.partition("</h1>")[2].partition("</a>")[0]


def test_the_sender_learns_that_others_may_not_see_all_runs(client: TestClient, db: Database) -> None:
    one, two = (run(db, "a", [1.0], project=project) for project in ("red", "blue"))
    beside = "runs of 2 projects: who sees one of them alone sees its runs alone"
    assert beside in client.get(f"/compare?jobs={one},{two}").text
    assert "projects:" not in client.get(f"/compare?jobs={one}").text


@pytest.mark.matrix(one_in=40, of="every page in a browser")
def test_a_run_that_diverged_does_not_flatten_the_others(db: Database, tmp_path: Path, tab: Page) -> None:
    fine = [run(db, f"lr-0.{n}", [5.0 / step + n / 10 for step in range(1, 121)]) for n in range(2)]
    bad = run(db, "lr-0.3", [36.7 * 1.43**step if step < 28 else math.nan for step in range(120)])
    with serving(create_app(db, tmp_path, reconcile=False)) as url:
        tab.goto(f"{url}/compare?jobs={','.join([*fine, bad])}")
        tab.wait_for_selector("#comparison[data-drawn]")
        tab.wait_for_selector("#cut:not([hidden])")
        note = tab.inner_text("#cut")
        assert "lr-0.3" in note and "show all" in note
        high = float(tab.get_attribute("#overlay", "data-high") or "inf")
        assert 5 <= high < 60
        tab.check("#all-values")
        wait_until(tab, "Number(document.getElementById('overlay').dataset.high) > 500000")
        tab.uncheck("#all-values")
        tab.check("#log-scale")
        wait_until(tab, "document.getElementById('cut').hidden")
        assert "log=1" in (tab.get_attribute("#permalink", "href") or "")
        tab.goto("about:blank")
