"""Every page, made from the list of routes, in real Chromium: three widths, light and dark, axe, and keys alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from trainmaster.store import jobs, tokens
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web import every_page
from web.furnished import serving
from web.test_pages_browser import violations

pytestmark = pytest.mark.timeout(600)  # some forty pages, each in a browser and under axe
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# What a person can act on and is shown. A radio button shares one stop with the others of its name; there are none.
ACTIVE = """() => [...document.querySelectorAll(
  'a[href], button, input:not([type=hidden]), select, textarea, summary, canvas[tabindex="0"], [tabindex="0"]')]
  .filter((e) => !e.disabled && e.checkVisibility({ visibilityProperty: true }))"""
# Before its first paint a browser looks for every family at every weight of the page: some 40 ms for each weight.
HEAVY = """() => [...new Set([...document.querySelectorAll('body *')].filter(
  (e) => !['400', '600'].includes(getComputedStyle(e).fontWeight)).map((e) => e.tagName))].join()"""
LATER = "() => document.getAnimations().filter((e) => e.animationName === 'later')"  # what is not laid out yet
NAME = "(e) => e.outerHTML.slice(0, 120)"


@pytest.fixture
def app(db: Database, tmp_path: Path) -> FastAPI:
    return create_app(db, tmp_path, reconcile=False, rate=None)


@pytest.fixture
def url(app: FastAPI, any_tab: Page) -> Iterator[str]:
    with serving(app) as address:
        yield address
        any_tab.goto("about:blank")  # an open stream would keep the server


def show(tab: Page, address: str) -> None:
    """Open a page and wait for what its scripts draw."""
    answer = tab.goto(address)
    assert answer is not None and answer.status < 500, address
    if tab.locator("#curves[data-job]").count():
        tab.locator("#curves[data-drawn=whole]").wait_for()
    if tab.locator("#log").count():
        tab.locator("#log[data-grown]").wait_for()
    tab.evaluate(f"Promise.all(({LATER})().map((e) => e.finished))")


def faults(tab: Page, url: str, addresses: Sequence[str]) -> str:
    """What is wrong with the pages at the present width and scheme."""
    wrong = []
    for address in addresses:
        show(tab, url + address)
        if (wide := tab.evaluate(WIDER)) > 0:
            wrong.append(f"{address}: {wide} px too wide")
        if heavy := tab.evaluate(HEAVY):
            wrong.append(f"{address}: a weight besides 400 and 600: {heavy}")
        wrong += [f"{address}: {rule}" for rule in violations(tab)]
    return "\n".join(wrong)


@pytest.mark.matrix(one_in=40, of="every page in a browser")
@pytest.mark.parametrize("width", [360, 1280, 2560])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("third", range(3))
def test_every_page_is_whole_and_accessible(
    any_tab: Page, db: Database, tmp_path: Path, app: FastAPI, url: str, third: int, scheme: str, width: int
) -> None:
    if importlib.util.find_spec("axe_playwright_python") is None:
        pytest.skip("no axe: pip install axe-playwright-python")
    any_tab.set_viewport_size({"width": width, "height": 900})
    any_tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    assert faults(any_tab, url, every_page.addresses(app, every_page.furnish(db, tmp_path))[third::3]) == ""


@pytest.mark.matrix(one_in=40, of="every page in a browser")
@pytest.mark.parametrize("third", range(3))
def test_every_page_of_a_new_server_is_accessible(any_tab: Page, app: FastAPI, url: str, third: int) -> None:
    if importlib.util.find_spec("axe_playwright_python") is None:
        pytest.skip("no axe: pip install axe-playwright-python")
    any_tab.set_viewport_size({"width": 360, "height": 740})
    nothing = dict.fromkeys(("uuid", "failed", "set_id"), every_page.NOBODY) | {"node": "n", "gpu": "g", "word": "w"}
    assert faults(any_tab, url, every_page.addresses(app, nothing)[third::3]) == ""


@pytest.mark.matrix(one_in=40, of="every page in a browser")
@pytest.mark.parametrize("third", range(3))
def test_tab_reaches_whatever_can_be_acted_on_and_shows_where_it_is(
    any_tab: Page, db: Database, tmp_path: Path, app: FastAPI, url: str, third: int
) -> None:
    wrong = []
    for address in every_page.addresses(app, every_page.furnish(db, tmp_path))[third::3]:
        # A page that is brought up to date under the focus gives it back to the top: then it is walked once more.
        for _ in range(3):
            show(any_tab, url + address)
            faults = walk(any_tab)
            if not faults:
                break
        wrong += [f"{address}: {fault}" for fault in faults]
    assert "\n".join(wrong) == ""


def walk(tab: Page) -> list[str]:
    """Press Tab once for everything that can be acted on; what was not reached, or did not show the focus."""
    tab.evaluate(f"() => {{ window.active = new Set(({ACTIVE})()); window.dim = []; }}")
    count = tab.evaluate("active.size")
    tab.keyboard.press("Escape")  # a field that has the focus from the start gives it back
    for _ in range(count + 3):
        tab.keyboard.press("Tab")
        # A ring, a changed border or ground: something must differ from the same element without the focus.
        tab.evaluate(
            "() => { const e = document.activeElement; active.delete(e); const s = getComputedStyle(e);"
            "if (e !== document.body && s.outlineStyle === 'none' && s.boxShadow === 'none') dim.push(e); }"
        )
    unreached = [f"no key reaches {e}" for e in tab.evaluate(f"[...active].map({NAME})")]
    return unreached + [f"the focus is not seen on {e}" for e in tab.evaluate(f"dim.map({NAME})")]


@pytest.mark.matrix(one_in=40, of="every page in a browser")
def test_what_changes_something_is_done_by_keys(any_tab: Page, db: Database, tmp_path: Path, url: str) -> None:
    tab = any_tab
    parts = every_page.furnish(db, tmp_path)
    asked: list[str] = []

    def answer(dialog: object) -> None:
        asked.append(dialog.message)  # type: ignore[attr-defined]
        dialog.accept()  # type: ignore[attr-defined]

    tab.on("dialog", answer)
    tab.goto(f"{url}/jobs/{parts['uuid']}")
    reach(tab, "#cancel")
    tab.keyboard.press("Enter")
    expect(tab.locator(".verdict .word")).to_have_text("Cancelling")
    row = jobs.find_job(db, parts["uuid"])
    assert row is not None and row.cancel_requested and len(asked) == 1
    tab.goto(f"{url}/settings")
    reach(tab, "input[name=name]")
    tab.keyboard.type("carol")
    tab.keyboard.press("Enter")
    expect(tab.locator("#secret")).to_contain_text("tm_")
    reach(tab, "[aria-label='Revoke carol']")
    tab.keyboard.press("Space")
    expect(tab.get_by_text("revoked", exact=True)).to_be_visible()
    made = tokens.find_by_name(db, "carol")
    assert made is not None and made.revoked_at is not None and len(asked) == 2
    tab.goto(f"{url}/compare")
    for job in (parts["uuid"], parts["failed"]):
        reach(tab, f"input[value='{job}']")
        tab.keyboard.press("Space")
    reach(tab, "#compare")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("heading", name="What differs")).to_be_visible()


def reach(tab: Page, place: str) -> None:
    """Press Tab until the focus is there."""
    for _ in range(200):
        if tab.evaluate("(place) => document.activeElement.matches(place)", place):
            return
        tab.keyboard.press("Tab")
    pytest.fail(f"no key reaches {place}")
