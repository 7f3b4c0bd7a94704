"""What a team reads: counts of what is listed, what to do with a token, links of the audit log, words of errors."""

from __future__ import annotations

import asyncio
import re
import socket
from datetime import UTC, datetime
from html import unescape

from starlette.testclient import TestClient

from pages import samples
from trainmaster.control.notify import send
from trainmaster.control.notify.outbox import message
from trainmaster.control.submit import request_cancel
from trainmaster.store.database import Database
from trainmaster.store.outbox import NewsRow
from web.test_cost_page import HOUR, run


def test_pills_count_what_the_list_is_filtered_by(db: Database, client: TestClient) -> None:
    now = datetime.now(UTC)
    for by in ("ann", "bob", "bob"):
        run(db, cents=100, start=now - 2 * HOUR, by=by)
    for query in ("by=bob", "find=bob"):
        pills = client.get(f"/?{query}").text.partition('class="filters"')[2].partition("</ul>")[0]
        assert re.search(r">All 2\b", pills) and ">Completed 2<" in pills, query
    pills = client.get("/?by=bob&status=failed").text.partition('class="filters"')[2].partition("</ul>")[0]
    assert re.search(r">All 2\b", pills) and ">Failed 0<" in pills


def test_a_new_token_says_what_its_owner_types(db: Database, client: TestClient) -> None:
    made = client.post("/settings/tokens", data={"name": "ann", "role": "user", "project": "lab"}).text
    typed = made.partition('id="next">')[2].partition("</pre>")[0]
    assert f"TRAINMASTER_SERVER={str(client.base_url).rstrip('/')}" in typed
    assert "TRAINMASTER_TOKEN_FILE=~/.trainmaster-token" in typed and "trainmaster jobs" in typed
    assert "trainmaster target grant TARGET --project lab" in made
    looks = client.post("/settings/tokens", data={"name": "eve", "role": "viewer", "project": "lab"}).text
    assert 'id="grant"' not in looks
    server = client.post("/settings/tokens", data={"name": "root", "role": "admin", "project": ""}).text
    assert 'id="grant"' not in server


def test_the_audit_log_leads_to_the_job_and_names_who_cancelled(db: Database, client: TestClient) -> None:
    story = samples.Story(db, samples.spec(), at=datetime.now(UTC))
    request_cancel(db, story.id, by="bob")
    log = client.get("/settings").text.partition('id="audit"')[2]
    (entry,) = re.findall(rf'href="([^"]*subject=job%3A{story.id}[^"]*)"', log)
    assert "<td>bob</td>" in log
    assert f'id="open-subject" href="/jobs/{story.id}"' in client.get(unescape(entry)).text


def test_a_button_pressed_by_local_is_of_local(db: Database, client: TestClient) -> None:
    story = run(db, cents=100, start=datetime.now(UTC) - HOUR, by=None)
    text = client.get(f"/jobs/{story.id}").text
    assert "<dt>Submitted by</dt><dd>local</dd>" in text and "command line</dd>" not in text


def test_a_fault_of_a_webhook_is_said_once(client: TestClient) -> None:
    refused = client.post("/settings/webhooks", data={"url": "http://hooks.example.org/x"})
    assert refused.status_code == 422 and refused.text.count("a webhook needs https") == 1


def test_a_name_that_is_not_known_is_said_in_words() -> None:
    def nobody(_host: str, _port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    sent = asyncio.run(send.send_webhook("https://hooks.invalid/x", b"{}", {}, resolve=nobody))
    assert sent.error == "the name hooks.invalid is not known"


def test_a_message_links_to_the_server_where_its_address_is_stated() -> None:
    news = NewsRow(
        id=1,
        key="k",
        at=datetime.now(UTC),
        topic="job.failed",
        project="lab",
        job_id="j",
        payload={"url": "/jobs/j"},
        spread_at=None,
    )
    assert (
        message(news, delivery="d", link="https://gpu.example.org")["data"]["url"] == "https://gpu.example.org/jobs/j"
    )
    assert message(news, delivery="d")["data"]["url"] == "/jobs/j"


def test_settings_say_where_the_file_of_channels_is(client: TestClient) -> None:
    """In words: a page names no path of the server (test_access_matrix.py)."""
    text = client.get("/settings").text
    assert "<code>notify.yaml</code> in the home folder of this server" in text and "HOME/notify.yaml" not in text
