"""Benchmarks of pages: of one that answers nothing any more the load stays, and what nobody asks for is left out."""

from __future__ import annotations

import argparse
import importlib.util
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from trainmaster.store.database import Database
from trainmaster.store.jobs import list_ids

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGE = """<body style="margin: 0"><canvas id="chart" width="800" height="400" style="background: teal"></canvas>
<script>document.querySelector("#chart").addEventListener("mouseup", () => {{ {then} }})</script>"""
HANGS = "const asked = new XMLHttpRequest(); asked.open('GET', '{url}', false); asked.send();"  # and computes nothing
ZOOMS = "document.querySelector('#chart').style.background = 'navy';"


def load(path: str, patch: pytest.MonkeyPatch) -> ModuleType:
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, FOLDER / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = load("tracker_parts/tracker_visits.py", monkeypatch)
    monkeypatch.setattr(module, "STILL_S", 0.3)
    monkeypatch.setattr(module, "VISIT_S", 6.0)
    monkeypatch.setattr(module, "CLOSE_S", 10.0)
    return module


@pytest.fixture
def hangs() -> Iterator[str]:
    """A script that never ends: it waits for the answer of a server that gives none."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield HANGS.format(url=f"http://127.0.0.1:{silent.getsockname()[1]}/")


def opened(tab: Page, url: str, _row: dict[str, Any]) -> str:
    tab.goto(url)
    return "#chart"


def write(folder: Path, then: str) -> str:
    page = folder / "page.html"
    page.write_text(PAGE.format(then=then))
    return page.as_uri()


@pytest.mark.spawns
@pytest.mark.proof
def test_a_page_that_hangs_keeps_its_load(
    browser: Browser, tmp_path: Path, visits: ModuleType, hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, find = [], visits.find_marked
    monkeypatch.setattr(visits, "find_marked", lambda mark: (marks.append(mark), find(mark))[1])
    seen = visits.visit(browser.browser_type, opened, write(tmp_path, hangs), {}, tmp_path / "hangs")
    assert seen.load_ms > 0 and (seen.zoom_ms, seen.heap_mb) == (None, None)
    assert str(seen.fault) == "zoom: given up after 6 s"
    assert len(marks) == 1 and find(marks[0]) == [], "its browser is gone"
    well = visits.visit(browser.browser_type, opened, write(tmp_path, ZOOMS), {}, tmp_path / "well")
    assert well.fault is None and well.zoom_ms > 0 and well.heap_mb > 0
    assert browser.is_connected(), "another browser stays"


@pytest.mark.spawns
@pytest.mark.proof
def test_a_page_that_hangs_while_it_loads_is_given_up(
    browser: Browser, tmp_path: Path, visits: ModuleType, hangs: str
) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<script>{hangs}</script>")
    with pytest.raises(TimeoutError, match="load: given up after 6 s"):
        visits.visit(browser.browser_type, opened, page.as_uri(), {}, tmp_path / "hangs")


@pytest.mark.spawns
@pytest.mark.proof
def test_the_table_has_the_load_of_a_page_that_hangs(
    browser: Browser, tmp_path: Path, visits: ModuleType, hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert visits.VISIT_S == 6
    trackers = load("trackers.py", monkeypatch)
    pages = {name: type(name, (), {"one": staticmethod(opened), "many": staticmethod(opened)}) for name in ("a", "b")}
    monkeypatch.setattr(trackers, "PAGES", pages)
    options = argparse.Namespace(rounds=2, folder=tmp_path, runs=1, points=1)
    urls, rows = {}, {}
    for name, then in (("a", hangs), ("b", ZOOMS)):
        folder = trackers.place(name, options)
        folder.mkdir()
        urls[name], rows[name] = write(folder, then), {}
    seen, _ = trackers.take_turns(browser.browser_type, urls, rows, options)
    assert [len(seen[each, page]) for each in urls for page in ("one", "many")] == [1, 1, 2, 2], "asked once"
    figures = trackers.summarize(seen["a", "one"])
    assert figures["load_ms"] > 0 and (figures["zoom_ms"], figures["heap_mb"]) == ("given up", "given up")
    assert "one, round 0: zoom: given up" in rows["a"]["fault"] and "fault" not in rows["b"]
    assert all(isinstance(value, int | float) for value in trackers.summarize(seen["b", "many"]).values())


@pytest.mark.spawns
def test_no_minutes_of_a_live_run_are_not_measured(
    browser: Browser, db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages_speed = load("pages_speed.py", monkeypatch)
    pages_speed.measure_memory(browser, "about:blank", db, tmp_path, 0.0)
    assert capsys.readouterr().out == "memory of a live run: not measured\n" and list_ids(db) == []
