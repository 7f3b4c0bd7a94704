"""A visit to a page of a tracker for trackers.py: load, zoom and heap, in a browser of its own that can be ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import Browser, BrowserType, Error, Page

CHROMIUM = "/usr/bin/chromium"
# Some pages ask others for scripts and fonts, and wait where the internet is neither there nor refused at once.
ALONE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", ALONE]
STILL_S, LONGEST_S = 3.0, 180.0
VISIT_S, CLOSE_S = 2 * LONGEST_S, 20.0  # for the load of a visit, and again for its zoom; then for the browser to close
Opened = Callable[[Page, str, dict[str, Any]], str]  # opens a page of what was written; where its charts are


class Seen(NamedTuple):
    """What one visit has measured; None: given up, for `fault`."""

    load_ms: float
    zoom_ms: float | None = None
    heap_mb: float | None = None
    fault: Exception | None = None


def visit(chromium: BrowserType, opened: Opened, url: str, row: dict[str, Any], picture: Path) -> Seen:
    """Milliseconds to load and to zoom, megabytes of the JavaScript heap; pictures of both for a person to look at.

    A load that was measured stays where the zoom is given up.
    """
    with own_browser(chromium) as (browser, pid):
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        context.set_default_timeout(1000 * LONGEST_S)
        tab = context.new_page()
        screen = Screen(tab)
        with limited(pid, "load"):
            load_ms, box = load(tab, screen, opened, url, row)
            tab.screenshot(path=f"{picture}-load.png")
        try:
            with limited(pid, "zoom"):
                zoom_ms, heap_mb = zoom(tab, screen, box)
                tab.screenshot(path=f"{picture}-zoom.png")
        except Exception as error:
            return Seen(load_ms, fault=error)
        return Seen(load_ms, zoom_ms, heap_mb)


@contextlib.contextmanager
def own_browser(chromium: BrowserType) -> Iterator[tuple[Browser, int]]:
    """A browser for one visit and its process, which is ended even where a tab of it answers nothing any more."""
    mark = f"--visit={uuid.uuid4().hex}"  # Chromium ignores it; Playwright does not tell the process
    browser = chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS, mark])
    (pid,) = find_marked(mark)
    try:
        yield browser, pid
    finally:
        with contextlib.suppress(Error, TimeoutError), limited(pid, "close", CLOSE_S):
            browser.close()


def find_marked(mark: str) -> list[int]:
    """Processes with this argument that no other one with it has started."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # one that has ended
            if mark.encode() in (place / "cmdline").read_bytes().split(b"\0"):
                found[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    return [pid for pid, parent in found.items() if parent not in found]


@contextlib.contextmanager
def limited(pid: int, what: str, limit_s: float | None = None) -> Iterator[None]:
    """End the browser where this takes too long, from a thread of its own: a call of Playwright cannot be interrupted,
    and raises when its browser is gone."""
    limit_s = VISIT_S if limit_s is None else limit_s
    over = threading.Event()

    def end() -> None:
        over.set()
        for each in family(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        yield
    except Error as error:
        if over.is_set():
            raise TimeoutError(f"{what}: given up after {limit_s:g} s") from error
        raise
    finally:
        timer.cancel()
        timer.join()


def load(tab: Page, screen: Screen, opened: Opened, url: str, row: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Milliseconds until the page has stopped to change, and where its largest chart is."""
    began = time.time()
    chart = opened(tab, url, row)
    load_s = screen.settle() - began
    boxes = [box for each in tab.locator(chart).all() if (box := each.bounding_box()) is not None]
    box = max(boxes, key=lambda each: each["width"] * each["height"], default=None)
    assert box is not None and box["width"] > 100, f"no chart at {chart}"
    return 1000 * load_s, dict(box)


def zoom(tab: Page, screen: Screen, box: dict[str, float]) -> tuple[float, float]:
    """Milliseconds from letting go of the mouse until the page has stopped to change, and megabytes of its heap."""
    y = box["y"] + box["height"] / 2
    if tab.locator(".icon-zoom-in").count():  # Aim zooms once its button was pressed
        tab.locator(".icon-zoom-in").first.click()
        screen.settle()
    tab.mouse.move(box["x"] + 0.4 * box["width"], y)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.6 * box["width"], y + 30, steps=8)
    screen.settle()
    let_go = time.time()
    tab.mouse.up()
    zoom_s = screen.settle() - let_go
    session = tab.context.new_cdp_session(tab)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
    return 1000 * zoom_s, heap


class Screen:
    """When the picture of a tab last changed."""

    def __init__(self, tab: Page) -> None:
        self.tab, self.last, self.changed = tab, "", time.time()
        self.session = tab.context.new_cdp_session(tab)
        self.session.on("Page.screencastFrame", self._look)
        self.session.send("Page.startScreencast", {"format": "jpeg", "quality": 40, "everyNthFrame": 1})

    def _look(self, frame: dict[str, Any]) -> None:
        if frame["data"] != self.last:
            self.last, self.changed = frame["data"], frame["metadata"]["timestamp"]
        with contextlib.suppress(Error):  # the tab was closed meanwhile
            self.session.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

    def settle(self) -> float:
        """Wait until nothing has changed for a while; the time of the last change, since 1970."""
        began = time.time()
        while time.time() - max(self.changed, began) < STILL_S:
            if time.time() - began > LONGEST_S:
                raise RuntimeError(f"the page still changed after {LONGEST_S:g} s")
            self.tab.wait_for_timeout(50)
        return self.changed


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    found, parents = [pid], {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    while more := [child for child, parent in parents.items() if parent in found and child not in found]:
        found += more
    return found
