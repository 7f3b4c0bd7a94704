"""Rows that are written without a template: every value in them is text. Pages of events leave none out."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from markupsafe import Markup

from pages import samples
from report.test_hostile import HOSTILE
from trainmaster.api.compare import ComparedRun
from trainmaster.api.events import Event
from trainmaster.core import events as core_events
from trainmaster.core.states import Stage, Status
from trainmaster.store.database import Database
from trainmaster.web import rows

from .conftest import TestClient

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
EVENT = Event(
    attempt="j.1", stream="events.jsonl", offset=0, length=1, ts=NOW, seq=1, phase="STEP", event="metrics",
    iteration=None, epoch=None, data={"loss": 2.5}, extra={}, fault=None, text=None,
)  # fmt: skip
RUN = ComparedRun(
    id="a" * 36, name="run", project="p", target="local", submitted_by=None, status=Status.COMPLETED, created_at=NOW,
    duration_s=61.0, step=5, values={"loss": 2.5}, texts={}, cost_cents=None, fields={"seed": "1"}, group=None,
)  # fmt: skip
BAD = "<b onclick='x'>&\"\u202e\x1b[31m"


@pytest.mark.parametrize("value", [HOSTILE, BAD])
def test_every_value_is_text(value: str) -> None:
    event = replace(EVENT, phase=value, event=value, fault=value, text=value, data={value: value, "list": [value]})
    run = replace(RUN, name=value, project=value, submitted_by=value, fields={"seed": value})
    line = rows.log_line(offset=7, label=value, link=f"/x?{value}", tone="bad", text=Markup("text"))
    table = rows.compared([run], fields=["seed"], metrics=["loss"], colours={run.id: 3})
    for html in (rows.events([event]), table, line):
        tags = set(re.findall(r"<(/?[a-z]+)", html))
        assert {tag.strip("/") for tag in tags} <= set("tr td b span a svg rect button div code".split())
        assert "onclick='" not in html and "\x1b" not in html and "\u202e" not in html
        assert not re.search(r"<(b|script|img)\s", html)


def test_what_rows_show() -> None:
    assert rows.events([EVENT]) == (
        '<tr><td class="nowrap">2026-03-01 12:00:00 UTC</td><td class="num">1</td><td class="nowrap">STEP</td>'
        '<td class="nowrap">metrics</td><td class="values"><span>loss=2.5</span></td></tr>\n'
    )
    html = rows.compared([RUN], fields=["seed"], metrics=["loss", "lr"], colours={RUN.id: 3})
    assert re.findall(r"<td[^>]*>([^<]*)</td>", html) == ["1", "5", "2.5", "–", "1 min 1 s", "unknown"]
    assert rows.log_line(offset=7, label="", link="/l", tone="", text=Markup("a&amp;b")) == (
        '<div class="line " id="L7"><a class="at" href="/l" aria-label="link to byte 7">7</a><code>a&amp;b</code></div>'
    )


def test_pages_of_events_leave_none_out(db: Database, client: TestClient) -> None:
    def steps() -> Any:
        for step in range(1, 251):
            yield core_events.Event(phase="STEP", event="metrics", ts=NOW, data={"step": step, "loss": 1.0})

    story = samples.Story(db).start().move(Stage.RUNNING).tell(steps())
    place, seen, pages = f"/jobs/{story.id}/events?phase=STEP", [], 0
    while place:
        text = client.get(place).text
        seen += [int(number) for number in re.findall(r"<span>step=(\d+)</span>", text)]
        following = re.search(r'id="more-events" rel="next" href="([^"]+)"', text)
        place = f"/jobs/{story.id}/events{following[1].replace('&amp;', '&')}" if following else ""
        pages += 1
    assert seen == list(range(1, 251)) and pages == 5, "fifty on a page, and none without any"


def test_a_hash_is_cut_and_its_whole_value_stays_in_the_title() -> None:
    whole = "sha256:" + "0123456789abcdef" * 4
    run = replace(RUN, fields={"seed": f"<b>{whole}"}, texts={"eval/loss": "NaN"})
    table = rows.compared([run], fields=["seed"], metrics=["loss", "eval/loss", "none"], colours={run.id: 3})
    assert f'<td><span title="&lt;b&gt;{whole}">&lt;b&gt;0123456789ab…</span></td>' in table
    assert '<td class="num">NaN</td><td class="num">–</td>' in table
