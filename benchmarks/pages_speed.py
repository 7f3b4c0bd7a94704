"""Speed of the dashboard in a real browser: 10,000 jobs, a run of 100,000 steps, a log of 1 GB.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/pages_speed.py FOLDER     minutes the first time; FOLDER is kept

Prints for each page the first contentful paint that Chromium reports, and for the run also the time from the end of a
drag to the redrawn curve; for the log the time of a search of the whole file. Medians of five.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from sqlalchemy import insert, select

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.states import Stage, Status
from trainmaster.store import artifacts, tables
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.web.app import create_app
from web.furnished import serving

STEPS, JOBS, LOG_BYTES = 100_000, 10_000, 1 << 30
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    fresh = not (folder / "run.id").exists()
    if fresh:  # an earlier one may have been stopped half way
        (folder / "trainmaster.db").unlink(missing_ok=True)
    db = open_database(folder / "trainmaster.db")
    if fresh:
        furnish(db, folder)
    run = (folder / "run.id").read_text()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        cold = [measure_paint(db, folder, browser.new_page(), f"/jobs/{run}") for _ in range(5)]
        report("run of 100,000 steps, never read: first paint", cold)
        with serving(create_app(db, folder, reconcile=False)) as url:
            tab = browser.new_page()
            report("list of 10,000 jobs: first paint", [paint(tab, f"{url}/") for _ in range(5)])
            report("search for a job: first paint", [paint(tab, f"{url}/search?q=job-77") for _ in range(5)])
            tab.goto(f"{url}/jobs/{run}")
            tab.locator("#curves[data-drawn=whole]").wait_for(timeout=120_000)
            report("run, read: first paint", [paint(tab, f"{url}/jobs/{run}") for _ in range(5)])
            tab.locator("#curves[data-drawn=whole]").wait_for(timeout=120_000)
            report("zoom of five curves", [zoom(tab) for _ in range(5)])
            log = f"{url}/jobs/{run}/logs?attempt=1&stream=rank-0.log"
            report("end of a log of 1 GB: first paint", [paint(tab, log) for _ in range(5)])
            report("middle of it: first paint", [paint(tab, f"{log}&at={LOG_BYTES // 2}") for _ in range(5)])
            for words in ("needle in the hay", r"step 9{7}\d loss", "no such words"):
                report(
                    f"search of it for {words!r}",
                    [timed(lambda w=words: tab.goto(f"{log}&find={w}")) for _ in range(5)],
                )
                print(f"    {tab.locator('#found').inner_text()[:90]}")
        browser.close()
    db.close()


def report(name: str, times_ms: list[float]) -> None:
    print(f"{name:52} {statistics.median(times_ms):7.0f} ms  (worst {max(times_ms):.0f})")


def paint(tab: Page, url: str) -> float:
    tab.goto(url)
    tab.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
    value: float = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return value


def measure_paint(db: Database, folder: Path, tab: Page, path: str) -> float:
    """The first paint of a page by a server that has read nothing yet."""
    with serving(create_app(db, folder, reconcile=False)) as url:
        tab.goto(f"{url}/search")  # the first request of a server compiles templates
        value = paint(tab, url + path)
        tab.close()
        return value


def zoom(tab: Page) -> float:
    """Milliseconds from the request of a window to the redrawn canvas."""
    script = """async () => {
      const canvas = document.querySelector('#curves canvas'), grid = document.querySelector('#curves');
      const begun = performance.now();
      canvas.dispatchEvent(new KeyboardEvent('keydown', { key: '+', bubbles: true }));
      const seen = performance.getEntriesByType('resource').length;
      while (performance.getEntriesByType('resource').length === seen) await new Promise((r) => setTimeout(r, 1));
      await new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)));
      return performance.now() - begun;
    }"""
    value: float = tab.evaluate(script)
    return value


def timed(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return 1000 * (time.monotonic() - begun)


def furnish(db: Database, folder: Path) -> None:
    story = samples.Story(db, samples.spec(name="long-run", train={"steps": STEPS})).start()
    story.tell([samples.project(story.attempt), *samples.preflight()]).move(Stage.RUNNING)
    for first in range(1, STEPS, 10_000):
        story.tell(steps(first, story.at))
    story.at += timedelta(seconds=0.2 * STEPS)
    story.end_attempt().finish(Status.COMPLETED)
    place = folder / "storage" / "jobs" / story.id / "attempts" / "1" / "rank-0.log"
    place.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with place.open("wb") as log:
        block = b"".join(
            b"2026-03-01 12:00:00 INFO train: step %07d loss 2.3456 lr 0.0003\n" % n for n in range(16_000)
        )
        while size < LOG_BYTES:
            size += log.write(block)
        size += log.write(b"2026-03-01 13:00:00 ERROR needle in the hay\n")
    now = datetime.now(UTC)
    with db.write() as conn:
        artifacts.insert_artifact(
            conn, job_id=story.id, attempt=None, kind="log", path="attempts/1/rank-0.log", size_bytes=size,
            sha256="0" * 64, at=now,
        )  # fmt: skip
        # Copies of one row: validating 10,000 specs takes minutes.
        row = dict(conn.execute(select(tables.jobs).where(tables.jobs.c.id == story.id)).mappings().one())
        each = [{**row, "id": f"{n:08d}-0000-4000-8000-000000000000", "name": f"job-{n}"} for n in range(JOBS)]
        conn.execute(insert(tables.jobs), each)
    (folder / "run.id").write_text(story.id)


def steps(first: int, at: datetime) -> Iterator[Event]:
    noise = random.Random(first)
    for step in range(first, first + 10_000):
        data = {
            "step": step, "loss": 1.8 + 4 * math.exp(-step / 9000) + noise.gauss(0, 0.05), "lr": 3e-4,
            "grad_norm": 0.4 + noise.random(), "tokens_per_s": 410_000 + noise.gauss(0, 5000), "mfu": 0.43,
            "step_s": 0.2, "memory_gib": 101.2,
        }  # fmt: skip
        yield Event(phase="STEP", event="metrics", ts=at + timedelta(seconds=0.2 * step), data=data)


if __name__ == "__main__":
    main()
