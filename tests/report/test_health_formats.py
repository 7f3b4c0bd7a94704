"""Whatever a cluster says: no format raises, each can be read by its own readers, and all give the same verdict."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ET
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, example, given, settings

from report import healths
from trainmaster.core.health import ClusterHealth
from trainmaster.core.results import Overall
from trainmaster.report import health as report
from trainmaster.report.health.view import View

# The grammar of Prometheus' text format, one line.
NAME, NUMBER = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r"[+-]?(\d+(\.\d+)?([eE][+-]?\d+)?|Inf|NaN)"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SERIES = re.compile(rf"({NAME})(\{{(?:{LABEL}(?:,{LABEL})*)?\}})? ({NUMBER})")
ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "main", "section", "div", "h1", "h2", "p", "b", "span", "dl",
    "dt", "dd", "header", "table", "thead", "tbody", "tr", "th", "td", "ol", "li", "svg", "g", "rect", "text", "figure",
    "figcaption", "details", "summary", "footer", "output", "line", "path", "circle", "desc",
    "code",
}  # fmt: skip


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)


def overall_of_each(view: View) -> dict[str, str]:
    """The verdict as each format tells it, after reading it as its own readers do."""
    text = {name: render(view) for name, render in report.FILES.items()}
    for whole in text.values():
        whole.encode("utf-8")
    metrics = json.loads(text["health_check_metrics.json"], parse_constant=pytest.fail)
    root = ET.fromstring(text["junit.xml"].encode())
    assert int(root.get("tests", "")) == len(root.findall("testsuite/testcase")) == len(list(view.rows))
    series = [SERIES.fullmatch(line) for line in text["metrics.prom"].rstrip("\n").split("\n") if line[0] != "#"]
    assert all(series)
    keys = [f"{found[1]}{found[2]}" for found in series if found]
    assert len(set(keys)) == len(keys), "a series that comes twice is refused"
    page = Elements()
    page.feed(text["report.html"])
    assert page.tags <= ELEMENTS
    assert not {name for name in page.attributes if name.startswith("on") or name in ("style", "href", "src")}
    on = next(found[2] for found in series if found and found[1] == "trainmaster_overall" and float(found[3]) == 1)
    verdicts = {node.get("value", "") for node in root.findall("testsuite/properties/property[@name='overall']")}
    return {
        "metrics": metrics["cluster_summary"]["overall_status"],
        "ours": metrics["overall"],
        "junit": " ".join(verdicts),
        "junit's counts": _by_counts(root, view),
        "prometheus": str(re.search(r'"(\w+)"', on)[1]),  # type: ignore[index]
        "html": str(re.search(r'<div class="word">(\w+)</div>', text["report.html"])[1]),  # type: ignore[index]
        "markdown": text["report.md"].split(":")[0].removeprefix("# "),
        "terminal": report.terminal.render(view)[0].split()[0],
    }


def _by_counts(root: ET.Element, view: View) -> str:
    """What somebody concludes who only counts failures and errors."""
    if int(root.get("failures", "")):
        return "FAIL"
    if int(root.get("errors", "")):
        return "INCOMPLETE"
    warned = any(str(row.verdict) == "warn" for row in view.rows)
    return "WARN" if warned else "PASS"


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(healths.HEALTHS)
@example(healths.mixed())
@example(healths.published_example())
@example(ClusterHealth(asked=(), nodes=()))
@example(ClusterHealth(asked=("n1",), nodes=(healths.healthy("n1"),)))
def test_all_formats_agree(health: ClusterHealth) -> None:
    told = overall_of_each(report.build(health))
    assert set(told.values()) == {str(health.overall)}, told


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(healths.HEALTHS)
def test_the_same_health_gives_the_same_bytes(health: ClusterHealth) -> None:
    for render in report.FILES.values():
        assert render(report.build(health)) == render(report.build(health))


def test_lines_for_a_terminal_hold_no_control_character() -> None:
    hostile = healths.node("n\x1b[31m1", healths.result("ram\x07", healths.fail("x\x1b]0;y\x07\nz", action="\x9b2J")))
    lines = report.render_terminal(ClusterHealth(asked=("n\x1b[31m1",), nodes=(hostile,)))
    assert lines[0].startswith("FAIL")
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", "".join(lines))


def test_the_page_allows_its_own_style_and_nothing_else() -> None:
    page = healths.render("report.html", healths.mixed())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "script-src" not in policy[1]
    assert policy[1].startswith("default-src &#39;none&#39;; style-src &#39;sha256-")
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in unescape(policy[1])


@pytest.mark.parametrize("overall", list(Overall))
def test_every_verdict_has_a_title(overall: Overall) -> None:
    healthy = healths.healthy("n1")
    runs = {
        Overall.PASS: (healthy,),
        Overall.WARN: (healths.node("n1", healths.result("ram", healths.warn("low", action="free some"))),),
        Overall.FAIL: (healths.node("n1", healths.result("ram", healths.fail("none", action="add some"))),),
        Overall.INCOMPLETE: (healths.node("n1", healths.result("ram", healths.skip("no", proof="x"))),),
    }
    view = report.build(ClusterHealth(asked=("n1",), nodes=runs[overall]))
    assert view.overall is overall
    assert overall_of_each(view)["terminal"] == str(overall)
    assert ("Ready" in view.title) is (overall in (Overall.PASS, Overall.WARN))
