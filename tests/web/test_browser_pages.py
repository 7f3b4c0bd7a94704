"""In a real browser: the pages beside the jobs are no wider than a phone, and the curves of a comparison are drawn."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from pages import samples
from trainmaster.queueing.state import Device
from trainmaster.store import audit
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.furnished import serving, wait_until
from web.test_compare_page import pair, run
from web.test_nodes_page import cluster


@pytest.mark.matrix(one_in=40, of="every page in a browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages(tab: Page, db: Database, tmp_path: Path, scheme: str) -> None:
    cluster(db)
    ids = ",".join(story.id for story in pair(db))
    tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    with serving(create_app(db, tmp_path, reconcile=False)) as url:
        for width in (360, 1280, 2560):
            tab.set_viewport_size({"width": width, "height": 800})
            for path in ("/nodes", "/nodes/one?node=node-00", "/cost", f"/compare?jobs={ids}", "/settings"):
                tab.goto(url + path)
                assert tab.locator("main").evaluate("(main) => main.scrollWidth - main.clientWidth") <= 0, (path, width)
        tab.goto(f"{url}/compare?jobs={ids}")
        expect(tab.locator("#comparison")).to_have_attribute("data-drawn", "1")
        tab.locator("#overlay").focus()
        tab.keyboard.press("ArrowRight")
        expect(tab.locator("#readout")).to_contain_text("run-0")
        tab.goto("about:blank")  # a page that still asked would be refused, and complain


@pytest.mark.matrix(one_in=40, of="every page in a browser")
def test_a_value_of_another_step_than_the_one_pointed_at_says_so(tab: Page, db: Database, tmp_path: Path) -> None:
    """Of 300 steps 240 are here: values of steps 152 and 153 were told as those of step 152.3."""
    ids = ",".join(run(db, name=f"run-{steps}", steps=steps).id for steps in (300, 310))
    with serving(create_app(db, tmp_path, reconcile=False)) as url:
        tab.goto(f"{url}/compare?jobs={ids}")
        expect(tab.locator("#comparison")).to_have_attribute("data-drawn", "1")
        tab.locator("#overlay").focus()
        told = []
        for _ in range(40):
            tab.keyboard.press("ArrowRight")
            told.append(tab.locator("#readout").inner_text())
        tab.goto("about:blank")
    elsewhere = 0
    for text in told:
        pointed = re.match(r"step ([\d,]+): ", text)
        assert pointed is not None, f"no whole step: {text}"
        for value, at in re.findall(r"run-\d+ ([\d.]+)(?: \(at (\d+)\))?", text):
            step = int(at or pointed[1])
            elsewhere += bool(at)
            assert abs(float(value) * step - 1) < 0.01, f"a loss of 1/step that is of another step: {text}"
    assert elsewhere, "each step of both runs was here: the test shows nothing"


@pytest.mark.matrix(one_in=40, of="every page in a browser")
def test_the_axis_of_a_comparison_has_no_minus_nothing(tab: Page, db: Database, tmp_path: Path) -> None:
    ids = ",".join(story.id for story in pair(db))
    tab.add_init_script(
        "window.texts = []; const fill = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (...of) { texts.push(of[0]); fill.apply(this, of); };"
    )
    with serving(create_app(db, tmp_path, reconcile=False)) as url:
        tab.goto(f"{url}/compare?jobs={ids}")
        expect(tab.locator("#comparison")).to_have_attribute("data-drawn", "1")
        wait_until(tab, "texts.includes('step')")
        drawn = tab.evaluate("texts")
        assert "0" in drawn and "-0" not in drawn
        tab.goto("about:blank")


@pytest.mark.proof
def test_on_a_phone_a_job_that_waits_is_a_card(tab: Page, db: Database, tmp_path: Path) -> None:
    """Of a row that is wider than the phone, the reason was read by scrolling alone."""
    samples.pending(db, name="n" * 63, project="p" * 63)
    tab.set_viewport_size({"width": 360, "height": 740})
    with serving(create_app(db, tmp_path, reconcile=False)) as url:
        tab.goto(f"{url}/queue")
        why = tab.locator(".jobs td.why").bounding_box()
        assert why is not None and why["x"] >= 0 and why["x"] + why["width"] <= 360, why
        assert tab.locator(".jobs .scroll").evaluate("(box) => box.scrollWidth - box.clientWidth") <= 0
        tab.goto("about:blank")


def test_the_buttons_of_a_table_that_is_wider_than_a_phone_stay_in_sight(
    tab: Page, db: Database, tmp_path: Path
) -> None:
    story = run(db, name="found", project="lab")
    at = datetime.now(UTC)
    with db.write() as conn:
        listed = [Device(id="GPU-0", machine="gpu-node-1", model="NVIDIA H200")]
        devices.record(conn, "local@elsewhere", "gpu", listed, at=at)
        audit.record(conn, who="boss", action="job.cancel", subject=f"job:{story.id}")
    with serving(create_app(db, tmp_path, reconcile=False)) as url:
        tab.set_viewport_size({"width": 390, "height": 800})
        for path, word in (("/queue", "Drain…"), ("/settings", "Change")):
            tab.goto(url + path)
            button = tab.locator(".scroll .button", has_text=word).first
            box = button.locator("xpath=ancestor::div[contains(@class, 'scroll')]")
            assert box.evaluate("(box) => box.scrollWidth - box.clientWidth") > 0
            assert "gradient" in box.evaluate("(box) => getComputedStyle(box).backgroundImage"), "its edge is seen"
            place = button.bounding_box()
            assert place is not None and place["x"] >= 0 and place["x"] + place["width"] <= 390, path
        links = tab.locator("tr", has_text="job.cancel").locator("a")
        assert links.count() == 1
        links.click()
        expect(tab.locator("#open-subject")).to_have_attribute("href", f"/jobs/{story.id}")
        tab.goto(f"{url}/search?q=found")
        assert re.search(r"\w lab\b", tab.locator(".hits li").first.inner_text().replace("\n", "|"))
        tab.goto("about:blank")
