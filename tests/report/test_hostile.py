"""Whatever a node writes stays text: no element, no attribute, no script, in HTML and in Markdown."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest

from pages import samples
from trainmaster import report
from trainmaster.core.events import Event
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import job
from trainmaster.report.html import asset
from trainmaster.store.database import Database

HOSTILE = "</script></pre></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'`{{7*7}}\x1b[31m]]>"


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)


def poison(value: Any) -> Any:
    """The same data with every text hostile, keys too."""
    if isinstance(value, dict):
        return {**{key: poison(item) for key, item in value.items()}, HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return HOSTILE if isinstance(value, str) or value is None else value


def hostile_events() -> list[Event | bytes]:
    found: list[Event | bytes] = [Event(phase=HOSTILE, event=HOSTILE, data={HOSTILE: HOSTILE})]
    for event in [samples.project("x"), *samples.preflight(), *samples.training()]:
        data = poison(dict(event.data))
        if event.event == "check":
            data["findings"][0]["verdict"] = event.data["findings"][0]["verdict"]
        found.append(Event(phase=event.phase, event=event.event, data=data, extra={HOSTILE: HOSTILE}))
    found.append(Event(phase="CHECKPOINT", event=HOSTILE, data={"path": HOSTILE, "why": HOSTILE}))
    found.append(HOSTILE.encode() + b"\n")
    return found


@pytest.fixture
def page(db: Database) -> job.JobPage:
    spec = samples.spec(target=f"local:{HOSTILE}", env={HOSTILE.replace("=", ""): HOSTILE})
    story = samples.Story(db, spec).start().move(Stage.RUNNING).tell(hostile_events())
    evidence = {HOSTILE: HOSTILE, "last_lines": [HOSTILE, HOSTILE], "deep": {HOSTILE: [HOSTILE]}}
    story.end_attempt(Reason.SCRIPT_FAILED, HOSTILE, exit_codes={HOSTILE: 1}, evidence=evidence)
    story.finish(Status.FAILED, Reason.SCRIPT_FAILED, HOSTILE)
    found = job.read(db, story.id, now=story.at)
    assert found is not None
    return found


def test_html_holds_our_elements_only(page: job.JobPage) -> None:
    html = report.render_html(page)
    assert html.count("&lt;script&gt;alert(1)") > 20  # it was drawn, as text
    found = Elements()
    found.feed(html)
    assert found.scripts == [asset("chart.js")]
    assert "img" not in found.tags
    assert not [name for name in found.attributes if name.startswith("on") or "alert" in name]
    assert "style" not in found.attributes


def test_markdown_holds_no_html(page: job.JobPage) -> None:
    fenced, bare = False, []
    for line in report.render_markdown(page).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            bare.append(line)
    text = "\n".join(bare)
    assert "alert" in text
    assert "<script" not in text.replace("\\<", "")
    assert "<img" not in text.replace("\\<", "")


def test_json_survives(page: job.JobPage) -> None:
    assert json.loads(report.render_json(page))["message"] == HOSTILE
