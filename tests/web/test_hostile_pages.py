"""Hostile content in every field, each role on every page, requests of other sites, streams of a revoked token.

Pages, routes and fields come from the application and the tables: a new one is in these tests at once.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, expect
from starlette.testclient import TestClient

from trainmaster.core.roles import Role
from trainmaster.store import tables, tokens
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.auth import COOKIE
from trainmaster.web.guard import SAFE_METHODS
from trainmaster.web.streaming import Followers
from web import every_page
from web.furnished import JOBS, issue, read_page, serving
from web.test_every_page import WIDER, show

ROLES: dict[str, tuple[Role, str | None]] = {
    "viewer": (Role.VIEWER, "research"), "stranger": (Role.USER, "other"), "user": (Role.USER, "research"),
    "project admin": (Role.ADMIN, "research"), "server admin": (Role.ADMIN, None),
}  # fmt: skip
# Elements that no page of ours has beside its own, and what a payload would have left behind had it run.
FOREIGN = (
    "() => document.querySelectorAll('img, iframe, object, embed, base, script:not([src]), [onerror], [onload]').length"
)


@pytest.mark.matrix(one_in=40, of="every page in a browser")
@pytest.mark.parametrize("width", [360, 1280])
def test_hostile_text_in_every_field_is_text_and_breaks_no_layout(
    any_tab: Page, db: Database, tmp_path: Path, width: int
) -> None:
    tab, app = any_tab, create_app(db, tmp_path, reconcile=False, rate=None)
    parts = every_page.furnish_hostile(db, tmp_path)
    tab.set_viewport_size({"width": width, "height": 740})
    opened: list[str] = []
    tab.on("dialog", lambda dialog: (opened.append(dialog.message), dialog.dismiss()))
    wrong, seen = [], 0
    with serving(app) as url:
        for address in every_page.addresses(app, parts):
            show(tab, url + address)
            tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
            if tab.locator("#curves-metrics label").count():  # the charts of metrics with such a name
                for label in tab.locator("#curves-metrics label", has_text="script").all():
                    label.click()
                expect(tab.locator("#curves figure b", has_text="onerror").first).to_be_visible()
            if (wide := tab.evaluate(WIDER)) > 0:
                wrong.append(f"{address}: {wide} px too wide")
            if not address.endswith("/report") and (found := tab.evaluate(FOREIGN)):
                wrong.append(f"{address}: {found} foreign elements")
            seen += "onerror=alert(1)" in tab.locator("body").inner_text()
        tab.goto("about:blank")
    assert (opened, "\n".join(wrong)) == ([], "")
    assert seen > 15, f"the text is on {seen} pages: too few to prove anything"


@pytest.mark.matrix(one_in=40, of="every page in a browser")
@pytest.mark.parametrize("name", ROLES)
def test_each_role_gets_the_pages_and_the_buttons_that_it_may_use(
    any_tab: Page, db: Database, tmp_path: Path, name: str
) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True, rate=None)
    parts, wrong = every_page.furnish(db, tmp_path), []
    token = issue(db, "anybody", *ROLES[name])["Authorization"].removeprefix("Bearer ")
    with serving(app) as url:
        any_tab.context.add_cookies([{"name": COOKIE, "value": token, "url": url}])
        for address in every_page.addresses(app, parts):
            answer = any_tab.goto(url + address)
            assert answer is not None
            wrong += judge(name, address, answer.status, any_tab, parts)
        any_tab.goto("about:blank")
    assert "\n".join(wrong) == ""


def judge(name: str, address: str, status: int, tab: Page, parts: dict[str, str]) -> list[str]:
    """What is wrong with the answer to this role."""
    own = {parts["uuid"], parts["failed"], parts["set_id"], parts["node"], parts["gpu"].replace(":", "%3A")}
    private = any(part in address for part in own)
    expected = {200}
    if every_page.NOBODY in address:
        expected = {404}
    elif address.startswith(("/nodes/drain", "/nodes/readmit")):
        expected = {200} if name == "server admin" else {403}
    elif name == "stranger" and private and not address.startswith("/compare"):
        expected = {404}
    wrong = [] if status in expected else [f"{name} {address}: {status}, not {expected}"]
    text = tab.locator("body").inner_text()
    secret = [word for word in ("llama", "node-17", "1652000000002") if word not in address]  # a refusal may repeat it
    if name == "stranger" and (found := [word for word in secret if word in text]):
        wrong.append(f"{name} {address}: shows {found}")
    actions = {re.sub(r"/[0-9a-f-]{36}/", "/ID/", each) for each in tab.locator("form[method=post]").evaluate_all(
        "(forms) => forms.map((form) => form.getAttribute('action'))")} - {"/logout", "/login"}  # fmt: skip
    of_users = {"/jobs/ID/cancel", "/jobs/ID/resume", "/jobs/ID/rerun", "/sets/ID/cancel"}
    of_admins = {
        each for each in actions if each.startswith(("/settings/tokens", "/settings/webhooks", "/settings/budgets"))
    }
    may = {"viewer": set(), "stranger": of_users, "user": of_users, "project admin": of_users | of_admins}
    if name in may and (more := actions - may[name]):
        wrong.append(f"{name} {address}: has the buttons {more}")
    return wrong


def test_a_role_has_its_buttons(db: Database, tmp_path: Path) -> None:
    """The other half of the test above: that a button is missing for one role means something if another has it."""
    app = create_app(db, tmp_path, reconcile=False, require_token=True, rate=None)
    parts = every_page.furnish(db, tmp_path)
    with TestClient(app, base_url="http://127.0.0.1:8470") as client:
        for name, address, form in (
            ("user", f"/jobs/{parts['uuid']}", "/cancel"), ("user", f"/sets/{parts['set_id']}", "/cancel"),
            ("project admin", "/settings", "/settings/tokens"),
            ("server admin", "/nodes/one?node=node-00", "/nodes/drain"),
        ):  # fmt: skip
            token = issue(db, uuid.uuid4().hex, *ROLES[name])
            assert form in client.get(address, headers=token).text, (name, address)


def test_another_site_reaches_no_route_that_changes_something(client: TestClient, db: Database, tmp_path: Path) -> None:
    parts = every_page.furnish(db, tmp_path)
    values = {**parts, **dict.fromkeys(("id", "name", "project", "period", "sha256", "machine"), "x")}
    before, asked = rows(db), 0
    for method, path in changing(client.app):  # type: ignore[arg-type]
        for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            answer = client.request(method, path.format(**values), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site"), (method, path)
            asked += 1
    assert asked > 60 and rows(db) == before


@pytest.mark.proof
def test_a_page_of_another_site_changes_nothing_in_a_browser_that_is_signed_in(
    any_tab: Page, db: Database, tmp_path: Path
) -> None:
    """By a form of another origin, which needs no script and no permission; the cookie is that of an admin."""
    tab, app = any_tab, create_app(db, tmp_path, reconcile=False, require_token=True, rate=None)
    parts = every_page.furnish(db, tmp_path)
    token = issue(db, "admin", Role.ADMIN)["Authorization"].removeprefix("Bearer ")
    with serving(app) as url:
        tab.context.add_cookies([{"name": COOKIE, "value": token, "url": url, "sameSite": "None", "secure": False}])
        assert tab.goto(f"{url}/settings").status == 200  # type: ignore[union-attr]
        before = rows(db)
        for path in (f"/jobs/{parts['uuid']}/cancel", f"/sets/{parts['set_id']}/cancel", "/settings/tokens"):
            page = f'<form method="post" action="{url}{path}"><input name="name" value="evil"><button>x</button></form>'
            tab.goto(f"data:text/html,{page}")
            with tab.expect_response(lambda answer, path=path: answer.url.endswith(path)) as sent:  # type: ignore[misc]
                tab.locator("button").click()
            assert sent.value.status in (401, 403), path
        assert rows(db) == before
        tab.goto("about:blank")


def rows(db: Database) -> dict[str, list[str]]:
    with db.read() as conn:
        return {
            table.name: sorted(repr({**row, "used_at": None}) for row in conn.execute(table.select()).mappings())
            for table in tables.metadata.sorted_tables
        }


def changing(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        for method in set(getattr(route, "methods", None) or ()) - SAFE_METHODS:
            yield method, re.sub(r":path", "", route.path)  # type: ignore[attr-defined]


def test_every_page_carries_the_policy_and_nothing_that_it_would_refuse(
    client: TestClient, db: Database, tmp_path: Path
) -> None:
    parts = every_page.furnish(db, tmp_path)
    for address in every_page.addresses(client.app, parts):  # type: ignore[arg-type]
        answer = client.get(address, headers={"accept": "text/html"})
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy, address
        assert answer.headers["x-content-type-options"] == "nosniff", address
        if not address.endswith("/report"):  # its own style and script are allowed by their hash
            assert not re.search(r"<style|\sstyle=|<script>|\son[a-z]+=", read_page(answer)), address


def test_a_revoked_token_ends_every_stream(db: Database, tmp_path: Path) -> None:
    followers = Followers(look_s=0.05, alive_s=0.2, token_check_s=0.2)
    app = create_app(db, tmp_path, reconcile=False, require_token=True, followers=followers)
    parts = every_page.furnish(db, tmp_path)
    streams = (
        f"{JOBS}/{parts['uuid']}/events", f"{JOBS}/{parts['uuid']}/logs/rank-0.log?follow=true",
        f"/jobs/{parts['uuid']}/logs/follow?stream=rank-0.log",
    )  # fmt: skip
    with serving(app) as url, httpx.Client(base_url=url, timeout=30, verify=False) as web:
        for number, path in enumerate(streams):
            token = issue(db, f"ann-{number}", Role.VIEWER, "research")
            with web.stream("GET", path, headers={"Accept": "text/event-stream", **token}) as answer:
                assert answer.status_code == 200, path
                pieces = answer.iter_raw()
                assert next(pieces)
                with db.write() as conn:
                    tokens.revoke(conn, f"ann-{number}", at=datetime.now(UTC))
                for _ in pieces:  # what was on its way; it ends, or the test does not
                    pass
            assert web.get(path, headers=token).status_code in (401, 303), path  # 303: a page leads to the login


@pytest.mark.proof
def test_an_open_page_of_a_revoked_token_is_told_nothing_more(browser: Browser, db: Database, tmp_path: Path) -> None:
    followers = Followers(token_check_s=0.2)
    app = create_app(db, tmp_path, reconcile=False, require_token=True, rate=None, followers=followers)
    parts = every_page.furnish(db, tmp_path)
    log = tmp_path / "going" / "rank-0.log"
    token = issue(db, "ann", Role.VIEWER, "research")["Authorization"].removeprefix("Bearer ")
    with serving(app) as url:
        context = browser.new_context()
        context.add_cookies([{"name": COOKIE, "value": token, "url": url}])
        tab = context.new_page()
        tab.goto(f"{url}/jobs/{parts['uuid']}/logs?stream=rank-0.log")
        expect(tab.locator("#follow")).to_have_text("Following")
        with log.open("ab") as written:
            written.write(b"INFO before\n")
        expect(tab.get_by_text("INFO before")).to_be_visible()
        with db.write() as conn:
            tokens.revoke(conn, "ann", at=datetime.now(UTC))
        until = time.monotonic() + 10
        while followers.open and time.monotonic() < until:
            time.sleep(0.05)
        assert followers.open == 0
        with log.open("ab") as written:
            written.write(b"INFO after\n")
        tab.wait_for_timeout(5000)  # it asks again every 3 s
        expect(tab.get_by_text("INFO after")).to_have_count(0)
        context.close()
