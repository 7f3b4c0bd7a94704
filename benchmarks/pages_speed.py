"""Speed of the dashboard in a real browser: 10,000 jobs, 200 runs of 100,000 steps, a log of 1 GB, an open live page.

    PYTHONPATH=src:tests .venv/bin/python -P benchmarks/pages_speed.py FOLDER     minutes the first time; FOLDER is kept
    PYTHONPATH=src:tests .venv/bin/python -P benchmarks/pages_speed.py FOLDER --runs 0 --live-min 60

Prints for each page the first contentful paint that Chromium reports, beside that of a bare page of the same number of
bytes from a server of its own, asked for in turns: on a machine with other work the difference is what the page costs.
Then zoom of curves and of the strips below them, from the key to the redrawn canvas; a log of 1 GB (open, jump, search,
follow); the memory of tabs over a live run. Medians of `--rounds`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright
from sqlalchemy import insert, select, text, update
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.states import Stage, Status
from trainmaster.store import artifacts, attempts, tables
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from web.furnished import serving

STEPS, JOBS, LOG_BYTES, NODES = 100_000, 10_000, 1 << 30, 8
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
COPY = "{}-0000-4000-8000-000000000000"  # ids of the 10,000 jobs
SEARCHES = ("needle in the hay", r"step 9{7}\d loss", r"ERR\w+ needle", "no such words", "nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=200, help="runs of 100,000 steps to compare; 50 MB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--live-min", type=float, default=10.0, help="minutes of the live run; 0: not measured")
    parser.add_argument("--no-paints", action="store_true", help="measure zoom, log and memory alone")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    db = prepare(folder, options.runs)
    run, live = (folder / "run.id").read_text(), (folder / "live.id").read_text()
    with sync_playwright() as driver, serving(bare_app()) as bare:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        with served(folder) as url:
            # The sums of a run are stored as it ends. Of these, written at once, they are one pass over all events.
            while b"is being added up" in urllib.request.urlopen(f"{url}/cost", timeout=60).read():
                time.sleep(2)
        if not options.no_paints:
            measure_cold(folder, browser, bare, f"/jobs/{run}", options.rounds)
        with served(folder) as url:
            if not options.no_paints:
                measure_paints(browser, url, bare, paths(db, run, options.runs), options.rounds)
            tab = browser.new_page()
            measure_zoom(tab, f"{url}/jobs/{run}", options.rounds)
            measure_log(tab, f"{url}/jobs/{run}/logs?attempt=1&stream=rank-0.log", options.rounds)
            measure_follow(tab, f"{url}/jobs/{live}/logs?stream=rank-0.log", folder / "live" / "rank-0.log", options)
            tab.close()
            measure_memory(browser, url, db, folder, options.live_min)
        browser.close()
    db.close()


def paths(db: Database, run: str, runs: int) -> dict[str, str]:
    """The pages whose first paint is measured."""
    own = tables.attempts.c
    with db.read() as conn:
        listed = list(conn.execute(select(own.job_id).order_by(own.job_id).limit(max(2, min(runs, 200)))).scalars())
    return {
        "list of 10,000 jobs": "/", "search for a job": "/search?q=job-77", "nodes": "/nodes", "cost": "/cost",
        "settings": "/settings", "run, read": f"/jobs/{run}", "run, events": f"/jobs/{run}/events",
        f"compare {len(listed)} runs": f"/compare?jobs={','.join(listed)}",
        "end of a log of 1 GB": f"/jobs/{run}/logs?attempt=1&stream=rank-0.log",
        "middle of it": f"/jobs/{run}/logs?attempt=1&stream=rank-0.log&at={LOG_BYTES // 2}",
    }  # fmt: skip


def measure_paints(browser: Browser, url: str, bare: str, pages: dict[str, str], rounds: int) -> None:
    """First paints of each page and of a bare one of its size, in turns; each in a browser context of its own."""
    for name, path in pages.items():
        settle(browser, url + path)  # a second look: caches of the server are warm, those of the browser are not
        times, plain, size = [], [], 0
        for _ in range(rounds):
            shown, size = paint(browser, url + path)
            times.append(shown)
            plain.append(paint(browser, f"{bare}/?bytes={size}")[0])
        report_paint(name, times, plain, size)


def report_paint(name: str, times: list[float], plain: list[float], size: int) -> None:
    low, high = statistics.median(plain), statistics.median(times)
    report(f"{name}: first paint", times, f"bare {low:4.0f} ms, beyond it {high - low:4.0f} ms, {size:,} bytes")


def settle(browser: Browser, url: str) -> None:
    """Open a page until the server has read what it shows: a long run is read beside its first page."""
    tab = browser.new_page()
    tab.goto(url)
    if tab.locator("#curves[data-job]").count():
        tab.locator("#curves[data-drawn=whole]").wait_for(timeout=300_000)
        tab.locator("#strips[data-drawn]").wait_for(timeout=300_000)
    tab.close()


# The content policy of our pages refuses what Playwright would poll with.
PAINTED = """() => new Promise((done) => new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (entry.name === 'first-contentful-paint') done(entry.startTime);
}).observe({ type: 'paint', buffered: true }))"""


def paint(browser: Browser, url: str) -> tuple[float, int]:
    """Milliseconds to the first contentful paint, and the bytes of the page."""
    context = browser.new_context()
    tab = context.new_page()
    answer = tab.goto(url)
    assert answer is not None and answer.ok, (url, answer)
    value: float = tab.evaluate(PAINTED)
    size = len(answer.body())
    context.close()
    return value, size


def measure_cold(folder: Path, browser: Browser, bare: str, path: str, rounds: int) -> None:
    """The first paint of a long run by a server that has read nothing yet."""
    times, plain, size = [], [], 0
    for _ in range(rounds):
        with served(folder) as url:
            paint(browser, f"{url}/search")
            shown, size = paint(browser, url + path)
        times.append(shown)
        plain.append(paint(browser, f"{bare}/?bytes={size}")[0])
    report_paint("run of 100,000 steps, never read", times, plain, size)


# From a key to the frame in which the redrawn canvases are shown, with the new points of the server.
ZOOM = """async ([place, key]) => {
  const canvas = document.querySelector(place), box = document.getElementById('curves');
  const drawn = new Promise((done) => new MutationObserver((_, o) => { o.disconnect(); done(); }).observe(box, { attributeFilter: ['data-drawn'] }));
  const frame = () => new Promise((r) => requestAnimationFrame(() => setTimeout(r, 0)));
  const begun = performance.now();
  canvas.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  await frame();
  const first = performance.now() - begun;
  await drawn;
  await frame();
  return [first, performance.now() - begun];
}"""  # noqa: E501 (JavaScript)


def measure_zoom(tab: Page, url: str, rounds: int) -> None:
    tab.goto(url)
    tab.locator("#curves[data-drawn=whole]").wait_for(timeout=300_000)
    tab.locator("#strips[data-drawn]").wait_for(timeout=300_000)
    for name, axis, place in (
        ("curves over steps", "step", "#curves canvas"), ("curves over time", "time", "#curves canvas"),
        ("strips over time", "time", "#strips canvas.bins"),
    ):  # fmt: skip
        tab.locator("#curves-axis").select_option(axis)
        tab.wait_for_timeout(1500)
        first, whole = [], []
        for _ in range(rounds):
            for key in ("+", "+", "0"):
                shown, pulled = tab.evaluate(ZOOM, [place, key])
                first.append(shown)
                whole.append(pulled)
        rows = tab.locator("#strips canvas").count()
        report(f"zoom of {name}, redrawn at once", first, f"{rows} strips")
        report(f"zoom of {name}, with its new points", whole)


def measure_log(tab: Page, log: str, rounds: int) -> None:
    """Jumps and searches in a log of 1 GB, by its links; a page load each."""

    def jump(link: str) -> float:
        return timed(lambda: (tab.locator(link).click(), tab.locator("#log .line").first.wait_for()))

    jumps: dict[str, list[float]] = {"#log-first": [], "#log-end": []}
    for _ in range(rounds):
        tab.goto(log)
        for link, took in jumps.items():
            took.append(jump(link))
    report("log: jump to the beginning", jumps["#log-first"])
    report("log: jump to the end", jumps["#log-end"])
    for words in SEARCHES:
        waited = []
        for _ in range(rounds):
            tab.goto(log)
            tab.locator("#log-find").fill(words)
            tab.locator("[name=regex]").check()
            waited.append(timed(lambda: (tab.locator("#log-find").press("Enter"), tab.locator("#found").wait_for())))
        report(f"log: search for {words!r}", waited, tab.locator("#found").inner_text()[:70])


def measure_follow(tab: Page, log: str, file: Path, options: argparse.Namespace) -> None:
    """From a line written at the node to the line on the page, at the end of a log of 1 GB."""
    tab.goto(log)
    tab.locator("#follow[aria-pressed=true]").wait_for()
    tab.wait_for_timeout(2000)
    took = []
    for number in range(options.rounds):
        words = f"line {os.getpid()}-{number}"
        with file.open("ab") as written:
            written.write(f"2026-03-01 14:00:00 INFO {words}\n".encode())
        took.append(timed(lambda w=words: tab.get_by_text(w).wait_for()))  # type: ignore[misc]
    report("log: a new line of the run is on the page", took, "the server looks every 0.7 s")


def measure_memory(browser: Browser, url: str, db: Database, folder: Path, minutes: float) -> None:
    """JavaScript heap, after a collection, and nodes of the DOM: the page of a live run and its log, left open."""
    if minutes <= 0:
        print("memory of a live run: not measured")
        return
    story = samples.Story(db, samples.spec(name="live-memory", train={"steps": STEPS}), at=datetime.now(UTC)).start()
    story.tell([samples.project(story.attempt), *samples.preflight()]).move(Stage.RUNNING)
    place = folder / f"live-{story.id}"
    place.mkdir()
    with db.write() as conn:
        attempts.set_handle(conn, story.attempt, {"attempt": story.attempt, "folder": str(place)})
    stop = threading.Event()

    def live() -> None:  # ten steps and lines a second
        step = 1
        while not stop.wait(1.0):
            at = datetime.now(UTC)
            story.tell(_event(n, at, random.Random(n)) for n in range(step, step + 10))
            with (place / "rank-0.log").open("ab") as log:
                log.write(b"".join(b"%s INFO train: step %d\n" % (at.isoformat().encode(), step) for _ in range(10)))
            step += 10

    writer = threading.Thread(target=live)
    writer.start()
    addresses = {"run": f"{url}/jobs/{story.id}", "log": f"{url}/jobs/{story.id}/logs?stream=rank-0.log"}
    open_ = contextlib.ExitStack()
    try:
        tabs: dict[str, tuple[Page, CDPSession]] = {}
        for name, address in addresses.items():
            tab = browser.new_page()
            time.sleep(3)
            tab.goto(address)
            tabs[name] = (tab, tab.context.new_cdp_session(tab))
        others = {name: open_.enter_context(unwatched(address)) for name, address in addresses.items()}
        time.sleep(10)  # they load
        seen: dict[str, list[tuple[float, float, int]]] = {name: [] for name in tabs}
        begun, every_s, told = time.monotonic(), min(30.0, 60 * minutes / 10), 0.0
        print(f"memory over {minutes:g} min of a live run of ten steps and ten lines of log a second:", flush=True)
        while (age := (time.monotonic() - begun) / 60) < minutes + every_s / 60:
            for name, (_, session) in tabs.items():
                session.send("HeapProfiler.collectGarbage")
                heap = session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
                nodes = session.send("Memory.getDOMCounters")["nodes"]
                seen[name].append((age, heap, nodes))
            if age >= told:
                shown = "; ".join(
                    f"{name} {points[-1][1]:.2f} MB, {points[-1][2]} nodes, process {tab_mb(others[name]):.0f} MB"
                    for name, points in seen.items()
                )
                print(f"    minute {age:4.1f}: {shown}; load {os.getloadavg()[0]:.1f}", flush=True)
                told += minutes / 12
            time.sleep(every_s)
        for name, points in seen.items():
            half = points[len(points) // 3 :]  # once the page has what it keeps
            slope = statistics.linear_regression([p[0] for p in half], [p[1] for p in half]).slope if half[1:] else 0
            print(f"    {name}: last two thirds {60 * slope:+.2f} MB an hour; "
                  f"nodes {points[0][2]} to {points[-1][2]}, at most {max(p[2] for p in points)}")  # fmt: skip
    finally:
        stop.set()
        writer.join()
        open_.close()
    story.end_attempt().finish(Status.COMPLETED)


@contextlib.contextmanager
def unwatched(url: str) -> Iterator[int]:
    """A browser with this tab and no developer tools, which keep every answer of the server beside the page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [CHROMIUM, *ARGUMENTS, "--headless=new", f"--user-data-dir={profile}", url]
        quiet = subprocess.DEVNULL
        browser = subprocess.Popen(words, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            yield browser.pid
        finally:
            os.killpg(browser.pid, 15)  # a group of its own, made above
            browser.wait(30)


def tab_mb(browser: int) -> float:
    """Memory of the process of a browser's tab that no other process shares, beside the frame around it."""
    kb = 0
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # one that has ended
            words = (place / "cmdline").read_bytes()
            if b"--type=renderer" in words and b"webui" not in words and os.getpgid(int(place.name)) == browser:
                lines = (place / "smaps_rollup").read_text().splitlines()
                kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kb / 1024


def report(name: str, times_ms: list[float], more: str = "") -> None:
    print(f"{name:52} {statistics.median(times_ms):7.0f} ms  (worst {max(times_ms):.0f})  {more}", flush=True)


def timed(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return 1000 * (time.monotonic() - begun)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """`trainmaster serve` in a process of its own, as users start it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(sys.executable).parent / "trainmaster"
    words = [program, "serve", "--home", folder, "--port", port, "--trust-loopback", "--no-reconcile"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(list(map(str, words)), stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/healthz", timeout=5):
                    break
                assert server.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.1)
            time.sleep(4)  # it warms up
            yield url
        finally:
            server.terminate()
            server.wait(30)


def bare_app() -> Starlette:
    """A server whose only page is of so many bytes of text, without a style or a script."""

    async def page(request: Request) -> HTMLResponse:
        head = "<!doctype html><html lang=en><title>bare</title><h1>bare</h1><p>"
        return HTMLResponse(head + "word " * ((int(request.query_params["bytes"]) - len(head)) // 5))

    return Starlette(routes=[Route("/", page)])


def prepare(folder: Path, runs: int) -> Database:
    """The database with its jobs; made where it is not there yet, or an earlier one was stopped half way."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = not (folder / "live.id").exists()
    if fresh:
        for name in ("trainmaster.db", "trainmaster.db-wal", "trainmaster.db-shm"):
            (folder / name).unlink(missing_ok=True)
    db = open_database(folder / "trainmaster.db")
    if fresh:
        furnish(db, folder)
    with db.read() as conn:
        own = tables.attempts.c
        copied = len(conn.execute(select(own.id).where(own.job_id.like(COPY.format("%")))).all())
    copy_runs(db, (folder / "run.id").read_text(), range(copied, runs))
    return db


def furnish(db: Database, folder: Path) -> None:
    story = samples.Story(db, samples.spec(name="long-run", train={"steps": STEPS})).start()
    story.tell([samples.project(story.attempt), *samples.preflight()]).move(Stage.RUNNING)
    for first in range(1, STEPS, 10_000):
        story.tell(steps(first, story.at))
    story.at += timedelta(seconds=0.2 * STEPS)
    story.end_attempt().finish(Status.COMPLETED)
    place = folder / "storage" / "jobs" / story.id / "attempts" / "1" / "rank-0.log"
    size = write_log(place)
    live = samples.Story(db, samples.spec(name="live-run")).start().move(Stage.RUNNING)
    (folder / "live").mkdir(exist_ok=True)
    (folder / "live" / "rank-0.log").unlink(missing_ok=True)
    os.link(place, folder / "live" / "rank-0.log")  # one file for both; what is appended is behind the stored size
    nodes = {"nodes": [f"node-{number:02}" for number in range(NODES)]}
    with db.write() as conn:
        attempts.set_handle(conn, live.attempt, {"attempt": live.attempt, "folder": str(folder / "live")})
        conn.execute(update(tables.attempts).where(tables.attempts.c.id == story.attempt).values(handle=nodes))
        artifacts.insert_artifact(
            conn, job_id=story.id, attempt=None, kind="log", path="attempts/1/rank-0.log", size_bytes=size,
            sha256="0" * 64, at=datetime.now(UTC),
        )  # fmt: skip
        # Copies of one row: validating 10,000 specs takes minutes.
        row = dict(conn.execute(select(tables.jobs).where(tables.jobs.c.id == story.id)).mappings().one())
        each = [{**row, "id": COPY.format(f"{n:08d}"), "name": f"job-{n}"} for n in range(JOBS)]
        conn.execute(insert(tables.jobs), each)
    (folder / "run.id").write_text(story.id)
    (folder / "live.id").write_text(live.id)


def write_log(place: Path) -> int:
    place.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with place.open("wb") as log:
        block = b"".join(
            b"2026-03-01 12:00:00 INFO train: step %07d loss 2.3456 lr 0.0003\n" % n for n in range(16_000)
        )
        while size < LOG_BYTES:
            size += log.write(block)
        return size + log.write(b"2026-03-01 13:00:00 ERROR needle in the hay\n")


def copy_runs(db: Database, run: str, numbers: range) -> None:
    """Give the first of the 10,000 jobs an attempt each with all events of the long run."""
    names = ", ".join(f'"{column.name}"' for column in tables.events.c if column.name != "attempt")
    copied = text(f"INSERT INTO events (attempt, {names}) SELECT :new, {names} FROM events WHERE attempt = :old")
    for number in numbers:
        job = COPY.format(f"{number:08d}")
        with db.write() as conn:
            made = attempts.insert_attempt(conn, job, 1, handle={"folder": "/x"}, at=datetime.now(UTC))
            conn.execute(copied, {"new": made, "old": f"{run}.1"})
            read = select(tables.streams).where(tables.streams.c.attempt == f"{run}.1")
            stream = dict(conn.execute(read).mappings().one())
            conn.execute(insert(tables.streams).values({**stream, "attempt": made}))


def steps(first: int, at: datetime) -> Iterator[Event]:
    noise = random.Random(first)
    for step in range(first, first + 10_000):
        yield _event(step, at + timedelta(seconds=0.2 * step), noise)


def _event(step: int, at: datetime, noise: random.Random) -> Event:
    data = {
        "step": step, "loss": 1.8 + 4 * math.exp(-step / 9000) + noise.gauss(0, 0.05), "lr": 3e-4,
        "grad_norm": 0.4 + noise.random(), "tokens_per_s": 410_000 + noise.gauss(0, 5000), "mfu": 0.43,
        "step_s": 0.2, "memory_gib": 101.2,
    }  # fmt: skip
    return Event(phase="STEP", event="metrics", ts=at, data=data)


if __name__ == "__main__":
    main()
