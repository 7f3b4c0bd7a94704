"""The dashboard in a real browser: every page at three widths in light and dark, axe, keys alone, zoom, a live log."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.plan import rank_log
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import job
from trainmaster.report import render_html
from trainmaster.store.database import Database
from trainmaster.web import ledgers
from trainmaster.web.app import create_app
from trainmaster.web.beside import Beside
from trainmaster.web.ledgers import Ledgers
from web.furnished import keep, serving
from web.test_run_tabs import FAILED, LOG

RUN = "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa', 'best-practice']})"


@pytest.fixture
def app(db: Database, tmp_path: Path) -> FastAPI:
    return create_app(db, tmp_path, reconcile=False)


@pytest.fixture
def url(app: FastAPI, tab: Page) -> Iterator[str]:
    with serving(app) as address:
        yield address
        tab.goto("about:blank")  # an open stream would keep the server


def furnish(db: Database, home: Path) -> tuple[samples.Story, samples.Story]:
    failed, resumed = samples.failed_run(db), samples.resumed(db)
    keep(db, home, failed.id, {f"attempts/1/{rank_log(0)}": LOG, f"attempts/1/{rank_log(1)}": FAILED})
    return failed, resumed


def violations(tab: Page) -> list[str]:
    """What axe says against the page, rule and place."""
    if not tab.evaluate("'axe' in window"):
        tab.evaluate(importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text())
    found = tab.evaluate(f"{RUN}.then((r) => r.violations)")
    return [f"{rule['id']}: {node['html'][:160]} {node['failureSummary']}" for rule in found for node in rule["nodes"]]


@pytest.mark.matrix(one_in=40, of="every page in a browser")
def test_every_page_at_every_width_is_whole_and_accessible(tab: Page, db: Database, tmp_path: Path, url: str) -> None:
    if importlib.util.find_spec("axe_playwright_python") is None:
        pytest.skip("no axe: pip install axe-playwright-python")
    failed, resumed = furnish(db, tmp_path)
    pages = ["/", f"/jobs/{resumed.id}", f"/jobs/{failed.id}/logs?stream=rank-1.log", "/search?q=llama", "/search"]
    tabs = [f"/jobs/{failed.id}/{name}" for name in ("events", "checkpoints", "preflight", "attempts", "cost", "files")]
    wrong: dict[str, list[str]] = {}
    for scheme, width, judged in (
        ("light", 1280, [*pages, *tabs]),
        ("dark", 360, pages[:3]),
        ("dark", 2560, pages[:3]),
    ):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for path in judged:
            tab.goto(url + path)
            if path == pages[1]:
                expect(tab.locator("#curves[data-drawn=whole] canvas").first).to_be_visible()
                expect(tab.locator("#strips[data-drawn] .row b")).to_have_text(["node-17"])
            wide = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide == 0, f"{path} is {wide} px wider than {width}"
            if width < 2000 and (found := violations(tab)):
                wrong[f"{path} {scheme} {width}"] = found
    assert "\n".join(f"{page}: {rule}" for page, rules in wrong.items() for rule in rules) == ""


@pytest.mark.matrix(one_in=40, of="every page in a browser")
def test_keys_alone_reach_everything(tab: Page, db: Database, tmp_path: Path, url: str) -> None:
    failed, resumed = furnish(db, tmp_path)
    tab.goto(url)
    tab.keyboard.press("?")
    expect(tab.locator("#keys")).to_be_visible()
    tab.keyboard.press("Escape")
    expect(tab.locator("#keys")).to_be_hidden()
    tab.keyboard.press("/")
    tab.keyboard.type("out of memory")
    tab.keyboard.press("Enter")
    expect(tab.locator("#hits-failure")).to_be_visible()
    tab.wait_for_load_state()  # keys are heard from then on
    tab.keyboard.press("g")
    tab.keyboard.press("r")
    expect(tab.get_by_role("heading", name="Runs")).to_be_visible()
    tab.goto(f"{url}/jobs/{resumed.id}")
    loss = tab.locator("#curves [data-metric=loss]")
    expect(tab.locator("#curves[data-drawn=whole]")).to_be_visible()
    loss.locator("canvas").focus()
    tab.keyboard.press("ArrowRight")
    expect(loss.locator(".readout")).to_contain_text("step 1 · attempt 1 · training 5.544")
    tab.keyboard.press("+")
    expect(tab.locator("#curves-whole")).to_be_visible()
    tab.keyboard.press("0")
    expect(tab.locator("#curves-whole")).to_be_hidden()
    tab.goto(f"{url}/jobs/{failed.id}/logs")
    tab.keyboard.press("e")
    tab.wait_for_url("**/logs?**stream=rank-1.log&at=*")
    expect(tab.locator(".line.chosen")).to_contain_text("Traceback (most recent call last)")


@pytest.mark.proof
def test_curves_zoom_and_hostile_names_and_numbers_are_only_drawn(tab: Page, db: Database, url: str) -> None:
    odd = "<img src=x onerror=alert(1)>"
    data = [
        {"step": n, "loss": "NaN" if n == 7 else 2.0 + n % 3, odd: n, "__proto__x": 1e308, "": n} for n in range(1, 60)
    ]
    story = samples.Story(db, samples.spec(name="odd")).start().move(Stage.RUNNING)
    story.tell(Event(phase="STEP", event="metrics", data=row) for row in data)
    tab.on("dialog", lambda dialog: pytest.fail(dialog.message))
    tab.goto(f"{url}/jobs/{story.id}")
    expect(tab.locator("#curves[data-drawn=whole]")).to_be_visible()
    tab.locator("#curves .menu summary").click()
    tab.locator("#curves-metrics label", has_text="onerror").click()
    expect(tab.locator("#curves figure b", has_text=odd)).to_be_visible()
    expect(tab.locator("#curves img")).to_have_count(0)
    tab.locator("#curves .menu summary").click()
    box = tab.locator("#curves [data-metric=loss] canvas").bounding_box()
    assert box is not None
    tab.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    with tab.expect_response(lambda answer: "low=" in answer.url) as zoomed:
        tab.mouse.up()
    page = json.loads(zoomed.value.body())
    assert 10 < len(page["segments"][0]["curves"]["loss"]) < 20
    tab.locator("#curves-axis").select_option("time")
    tab.locator("#curves-log").check()
    expect(tab.locator("#curves-whole")).to_be_hidden()
    strips = tab.locator("#strips[data-drawn]")
    expect(strips.locator("output")).to_have_text(re.compile(r"from submission$"))  # one axis with the curves
    tab.mouse.move(2, 2)  # else it is told, a moment later, that what lies under it is another now
    strips.locator("canvas.bins").focus()
    tab.keyboard.press("ArrowRight")
    expect(strips.locator("output")).to_contain_text("queued")
    with tab.expect_download() as picture:
        tab.locator("#curves-png").click()
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")


@pytest.mark.proof
def test_strips_that_come_late_are_shown(
    tab: Page, db: Database, url: str, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger of a long run takes longer than the first swap of its page, which puts a new element there."""
    monkeypatch.setattr(ledgers, "_SMALL", 0)
    app.state.ledgers = Ledgers(db, Beside(wait_s=4.0))
    story = samples.resumed(db)
    tab.goto(f"{url}/jobs/{story.id}")
    expect(tab.locator("#strips[data-drawn] .row b")).to_have_text(["node-17"], timeout=30_000)


@pytest.mark.proof
def test_a_curve_of_one_point_is_a_dot(tab: Page, db: Database, url: str) -> None:
    story = samples.Story(db, samples.spec(name="short")).start().move(Stage.RUNNING)
    story.tell([Event(phase="STEP", event="metrics", data={"step": 2, "loss": 2.5})])
    tab.goto(f"{url}/jobs/{story.id}")
    expect(tab.locator("#curves[data-drawn=whole]")).to_be_visible()
    coloured = """(canvas) => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let many = 0;
      for (let at = 0; at < data.length; at += 4) {
        const rgb = data.slice(at, at + 3);
        if (data[at + 3] > 200 && Math.max(...rgb) - Math.min(...rgb) > 60) many += 1;
      }
      return many;
    }"""
    assert tab.locator("#curves [data-metric=loss] canvas").evaluate(coloured) > 0


def test_a_page_that_was_opened_before_the_first_step_gets_its_curves_with_their_tools(
    tab: Page, db: Database, url: str
) -> None:
    story = samples.Story(db, samples.spec(name="early")).start().move(Stage.RUNNING)
    tab.goto(f"{url}/jobs/{story.id}")
    expect(tab.locator("#curves .empty")).to_be_visible()
    tab.evaluate("document.querySelector('#curves').dataset.first = '1'")
    expect(tab.locator("#curves:not([data-first])")).to_be_attached(timeout=20_000)  # the page was swapped
    story.tell([Event(phase="STEP", event="metrics", data={"step": step, "loss": 2.5}) for step in (1, 2)])
    expect(tab.locator("#curves-axis")).to_be_visible(timeout=20_000)
    expect(tab.locator("#curves [data-metric=loss] canvas")).to_be_visible()


@pytest.mark.proof
def test_a_zoom_is_drawn_at_once_from_the_points_that_are_here(tab: Page, db: Database, url: str) -> None:
    story = samples.resumed(db)
    tab.goto(f"{url}/jobs/{story.id}")
    expect(tab.locator("#curves[data-drawn=whole]")).to_be_visible()
    tab.route("**/curves?*", lambda route: route.fulfill(status=204))  # no finer points come
    canvas = tab.locator("#curves [data-metric=loss] canvas")

    def press(key: str) -> str:
        """The picture after a key, in the same turn."""
        return str(canvas.evaluate("""(canvas, key) => {
          if (key) canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
          return canvas.toDataURL();
        }""", key))  # fmt: skip

    whole = press("")
    near = press("+")
    nearer = press("+")
    assert len({whole, near, nearer}) == 3
    assert press("-") == near, "and out again"
    assert press("0") == whole


@pytest.mark.proof
def test_the_last_lines_of_a_failed_run_are_open_at_their_end(
    tab: Page, db: Database, tmp_path: Path, url: str
) -> None:
    lines = [f"line {number}" for number in range(60)]
    story = samples.Story(db).start().move(Stage.RUNNING)
    evidence = {"log": rank_log(1), "last_lines": [*lines, *samples.LAST_LINES]}
    story.end_attempt(Reason.SCRIPT_FAILED, "rank 1 of 2 exited with 1", evidence=evidence)
    story.finish(Status.FAILED, Reason.SCRIPT_FAILED, "rank 1 of 2 exited with 1")
    other = LOG + b"RuntimeError: a peer is gone\n"
    keep(db, tmp_path, story.id, {f"attempts/1/{rank_log(0)}": other, f"attempts/1/{rank_log(1)}": FAILED})
    page = job.read(db, story.id)
    assert page is not None
    (tmp_path / "report.html").write_text(render_html(page))
    for address in ((tmp_path / "report.html").as_uri(), f"{url}/jobs/{story.id}"):
        tab.goto(address)
        above, below = tab.locator("pre.proof").evaluate(
            "(box) => [box.scrollTop, box.scrollHeight - box.clientHeight - box.scrollTop]"
        )
        assert above > 0 and abs(below) <= 1, address
    tab.click("#to-error")
    at = FAILED.index(b"Traceback")
    expect(tab).to_have_url(f"{url}/jobs/{story.id}/logs?attempt=1&stream={rank_log(1)}&at={at}#L{at}")


def test_a_page_of_a_log_gets_the_lines_of_the_next_window(tab: Page, db: Database, tmp_path: Path, url: str) -> None:
    failed, _ = furnish(db, tmp_path)
    log, lines = f"{url}/jobs/{failed.id}/logs?stream=rank-1.log", tab.locator("#log .line")
    places = [0, *(found.end() for found in re.finditer(rb"\n", FAILED))][:-1]

    def shown() -> list[int]:
        ids = lines.evaluate_all("(all) => all.map((line) => line.id)")
        return [int(each.removeprefix("L")) for each in ids]

    tab.goto(log)
    expect(lines).to_have_count(400)
    assert shown() == places[-400:], "the end, and the lines before it"
    below = tab.locator("#log").evaluate("(box) => box.scrollHeight - box.clientHeight - box.scrollTop")
    assert abs(below) <= 1, "its end stays in sight"
    expect(tab.locator("#log-from")).to_have_text(f"{places[-400]:,}")
    tab.click("#log-earlier")
    expect(lines).to_have_count(400)
    assert shown() == places[-800:-400]
    tab.goto(f"{log}&at=0")
    expect(tab.locator("#log-to")).to_have_text(f"{places[392]:,}")
    assert shown() == places[:392], "the next window begins with eight lines of this one"
    tab.click("#log-later")
    tab.wait_for_url(f"**at={places[392]}")
