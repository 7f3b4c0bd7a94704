"""In a real browser: the curves are there, the live page follows its job, and no request leaves this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import pytest
import uvicorn
from playwright.sync_api import Page, expect

from pages import samples
from report import healths
from report.test_hostile import HOSTILE, hostile_events
from trainmaster import report
from trainmaster.core.events import Event
from trainmaster.core.health import ClusterHealth
from trainmaster.core.results import ok
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import job
from trainmaster.report.health import write_bundle
from trainmaster.store import jobs, tokens
from trainmaster.store.database import Database
from trainmaster.store.tokens import Role
from trainmaster.web.app import create_app
from web.furnished import issue, serving


@pytest.fixture
def url(db: Database, tmp_path: Path, tab: Page) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(db, tmp_path, reconcile=False), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    tab.goto("about:blank")  # a page that still refreshed itself would be refused, and complain
    server.should_exit = True
    thread.join()
    listening.close()


def width_left_over(tab: Page) -> int:
    """How far the page can be scrolled sideways."""
    width: int = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


def write(db: Database, story: samples.Story, folder: Path) -> str:
    page = job.read(db, story.id)
    assert page is not None
    return report.write(page, folder / "report.html").as_uri()


@pytest.mark.proof
def test_the_report_file(tab: Page, db: Database, tmp_path: Path) -> None:
    tab.goto(write(db, samples.completed(db), tmp_path))
    curve = tab.locator("#chart-loss path.s0")
    assert curve.get_attribute("d").count("L") == 199  # type: ignore[union-attr]
    box = curve.bounding_box()
    assert box is not None
    assert box["width"] > 500
    assert box["height"] > 100
    expect(tab.locator("#chart-loss circle")).to_have_count(4)
    expect(tab.locator("#preflight-table tbody tr")).to_have_count(1)
    expect(tab.locator("#preflight-passed summary")).to_have_text("3 checks passed")
    expect(tab.locator("#preflight-passes tbody tr")).to_have_count(3)
    expect(tab.locator("#preflight-skipped summary")).to_have_text("1 check does not apply here")
    expect(tab.locator("figure.chart")).to_have_count(4)


@pytest.mark.proof
def test_a_printed_heat_map_has_all_its_columns(tab: Page, tmp_path: Path) -> None:
    results = (healths.result(f"check_{number:02}", ok("fine")) for number in range(60))
    node = healths.node("gpu-001", *results)
    write_bundle(ClusterHealth(asked=("gpu-001",), nodes=(node,), started_at=healths.AT, took_s=1.0), tmp_path)
    tab.set_viewport_size({"width": 720, "height": 1000})  # the width of A4 paper between its margins
    tab.emulate_media(media="print")
    tab.goto((tmp_path / "report.html").as_uri())
    around = tab.locator(".heat .scroll").bounding_box()
    maps = tab.locator(".heat .scroll svg").all()
    assert around is not None and len(maps) == 2, "60 checks go on below"
    for part in maps:
        columns = part.bounding_box()
        assert columns is not None
        assert columns["width"] <= around["width"] + 1, "columns beyond the paper are not printed"
    expect(tab.locator(".heat .scroll svg text.col")).to_have_count(60)


@pytest.mark.proof
def test_the_curve_reads_out_under_pointer_and_arrows(tab: Page, db: Database, tmp_path: Path) -> None:
    tab.goto(write(db, samples.completed(db), tmp_path))
    read_out, axes = tab.locator("#chart-loss .readout"), tab.locator("#chart-loss .axes")
    axes.hover(position={"x": 5, "y": 50})
    expect(read_out).to_contain_text("step 1 · training 5.544")
    tab.mouse.move(0, 0)
    expect(read_out).to_have_text("5.544 → 1.948")
    axes.focus()
    tab.keyboard.press("ArrowLeft")
    expect(read_out).to_contain_text("step 200 · training 1.948 · held-out 2.018")
    tab.keyboard.press("ArrowLeft")
    expect(read_out).to_contain_text("step 199")


@pytest.mark.proof
def test_the_curve_of_tiny_values_reads_out_its_data(tab: Page, db: Database, tmp_path: Path, url: str) -> None:
    """A learning rate: in the report, in the report of the server, and on the run page, whose script draws it anew."""
    story = samples.Story(db).start().move(Stage.RUNNING)
    story.tell(
        Event(phase="STEP", event="metrics", data={"step": step, "loss": 2.0, "lr": step * 1.2e-8})
        for step in range(1, 26)
    )
    story.end_attempt().finish(Status.COMPLETED)
    for address in (write(db, story, tmp_path), f"{url}/jobs/{story.id}/report"):
        tab.goto(address)
        read_out, axes = tab.locator("#chart-lr .readout"), tab.locator("#chart-lr .axes")
        drawn = axes.screenshot()
        axes.locator("path").evaluate("(path) => path.remove()")
        assert axes.screenshot() != drawn, "the line is seen: Chromium draws none in units as small as these"
        axes.focus()
        tab.keyboard.press("ArrowRight")
        expect(read_out).to_have_text("step 1 · learning rate 1.20e-8")
        tab.keyboard.press("ArrowRight")
        expect(read_out).to_have_text("step 2 · learning rate 2.40e-8")
        wide = axes.bounding_box()
        assert wide is not None
        axes.hover(position={"x": wide["width"] * 0.52, "y": 50})
        expect(read_out).to_have_text("step 13 · learning rate 1.56e-7")
    tab.goto(f"{url}/jobs/{story.id}")
    expect(tab.locator("#curves[data-drawn=whole]")).to_be_visible()
    card = tab.locator("#curves [data-metric=lr]")
    card.locator("canvas").focus()
    tab.keyboard.press("ArrowRight")
    expect(card.locator(".readout")).to_contain_text("step 1 ")


@pytest.mark.proof
def test_hostile_values_do_nothing(tab: Page, db: Database, tmp_path: Path, url: str) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING).tell(hostile_events())
    story.end_attempt(Reason.SCRIPT_FAILED, HOSTILE, evidence={"last_lines": [HOSTILE]})
    story.finish(Status.FAILED, Reason.SCRIPT_FAILED, HOSTILE)
    opened: list[str] = []
    tab.on("dialog", lambda dialog: opened.append(dialog.message))
    for address in (write(db, story, tmp_path), f"{url}/jobs/{story.id}", f"{url}/jobs/{story.id}/report", url):
        tab.goto(address)
        expect(tab.locator("img")).to_have_count(0)
    assert opened == []


def test_the_live_page_follows_its_job(tab: Page, db: Database, url: str) -> None:
    story = samples.resumed(db)
    tab.goto(f"{url}/jobs/{story.id}")
    expect(tab.get_by_text("140 / 200")).to_be_visible()
    expect(tab.locator("#curves[data-drawn=whole] canvas")).to_have_count(4)
    tab.locator("#curves .menu summary").click()
    tab.evaluate("scrollTo(0, 300)")
    tab.mouse.move(2, 2)
    story.tell(samples.training(141, 160, end=False))
    expect(tab.get_by_text("160 / 200")).to_be_visible(timeout=15_000)
    assert tab.evaluate("scrollY") == 300
    expect(tab.locator("#curves .menu")).to_have_attribute("open", "")
    story.tell(samples.training(161, 200)).end_attempt().finish(Status.COMPLETED)
    expect(tab.locator(".verdict .word")).to_have_text("Completed", timeout=15_000)
    assert tab.title() == "llama-trial: completed – Trainmaster"
    expect(tab.locator("#curves .readout").first).to_contain_text("→ 1.948")


@pytest.mark.proof
def test_cancel_asks_first(tab: Page, db: Database, url: str) -> None:
    story = samples.resumed(db)
    tab.goto(f"{url}/jobs/{story.id}")
    tab.once("dialog", lambda dialog: dialog.dismiss())
    tab.locator("#cancel").click()
    row = jobs.find_job(db, story.id)
    assert row is not None
    assert not row.cancel_requested
    tab.once("dialog", lambda dialog: dialog.accept())
    tab.locator("#cancel").click()
    expect(tab.locator(".verdict .word")).to_have_text("Cancelling")
    row = jobs.find_job(db, story.id)
    assert row is not None
    assert row.cancel_requested


@pytest.mark.proof
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(tab: Page, db: Database, url: str, scheme: str) -> None:
    tab.set_viewport_size({"width": 360, "height": 740})
    tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    tab.goto(url)
    assert width_left_over(tab) == 0
    stories = [samples.failed_run(db), samples.failed_check(db), samples.pending(db, name="n" * 63, project="p" * 63)]
    for path in ("/", *(f"/jobs/{story.id}" for story in stories)):
        tab.goto(url + path)
        tab.evaluate("document.querySelectorAll('details').forEach((section) => { section.open = true; })")
        assert width_left_over(tab) == 0, path
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(246, 246, 244)", "dark": "rgb(15, 16, 18)"}[scheme]


@pytest.mark.matrix(one_in=2, of="sign-in with a browser")
def test_a_person_signs_in_and_out(tab: Page, db: Database, tmp_path: Path) -> None:
    story = samples.resumed(db)
    token = issue(db, "ann", Role.USER)["Authorization"].removeprefix("Bearer ")
    with serving(create_app(db, tmp_path, reconcile=False, require_token=True)) as url:
        tab.goto(f"{url}/jobs/{story.id}")
        expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()
        tab.get_by_label("Token").fill(token)
        tab.get_by_role("button", name="Sign in").click()
        expect(tab.get_by_text("140 / 200")).to_be_visible()  # back where they wanted to go
        assert tab.url == f"{url}/jobs/{story.id}"
        assert tab.evaluate("document.cookie") == ""
        tab.once("dialog", lambda dialog: dialog.accept())
        tab.locator("#cancel").click()
        expect(tab.locator(".verdict .word")).to_have_text("Cancelling")
        tab.locator("#sign-out").click()
        expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()
        tab.goto(url)
        expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()


@pytest.mark.proof
def test_an_open_page_whose_token_is_revoked_goes_to_the_sign_in_page(tab: Page, db: Database, tmp_path: Path) -> None:
    samples.resumed(db)
    token = issue(db, "ann", Role.USER)["Authorization"].removeprefix("Bearer ")
    with serving(create_app(db, tmp_path, reconcile=False, require_token=True)) as url:
        tab.goto(f"{url}/?status=running")
        tab.get_by_label("Token").fill(token)
        tab.get_by_role("button", name="Sign in").click()
        expect(tab.locator("#live")).to_be_visible()
        with db.write() as conn:
            assert tokens.revoke(conn, "ann", at=datetime.now(UTC))
        expect(tab.get_by_role("heading", name="Sign in")).to_be_visible(timeout=15_000)
        expect(tab.locator("#live")).to_have_count(0)
        assert tab.url == f"{url}/login?next={quote('/?status=running', safe='')}"
