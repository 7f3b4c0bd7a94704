"""Screenshots of the dashboard for docs/pictures/, from made-up runs in a real browser. Look at them afterwards.

PYTHONPATH=src:tests .venv/bin/python tools/write_pictures.py
"""

from __future__ import annotations

import tempfile
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import picture_sources
from playwright.sync_api import sync_playwright
from sqlalchemy import insert, update

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage
from trainmaster.queueing.state import Device
from trainmaster.store import jobs, leases, tables
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.targets import find_place
from trainmaster.web.app import create_app
from web.furnished import keep, serving

PICTURES = picture_sources.PICTURES
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        home = Path(name)
        db = open_database(home / "trainmaster.db")
        run, failed = furnish(db, home)
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        with serving(create_app(db, home, reconcile=False)) as url:
            for file, path, width, scheme in (
                ("dashboard-runs", "/", 1280, "light"),
                ("dashboard-run", f"/jobs/{run}", 1280, "light"),
                ("dashboard-run-dark", f"/jobs/{run}", 1280, "dark"),
                ("dashboard-run-phone", f"/jobs/{run}", 360, "dark"),
                ("dashboard-logs", f"/jobs/{failed}/logs", 1280, "light"),
                ("dashboard-queue", "/queue", 1280, "light"),
                ("dashboard-nodes", "/nodes", 1280, "light"),
                ("dashboard-cost", "/cost", 1280, "light"),
                ("dashboard-compare", f"/compare?jobs={run},{failed}", 1280, "light"),
                ("dashboard-settings", "/settings", 1280, "light"),
            ):
                context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=scheme)  # type: ignore[arg-type]
                tab = context.new_page()
                tab.goto(url + path)
                if path.endswith(run):
                    tab.locator("#curves[data-drawn=whole]").wait_for()
                    tab.locator("#strips[data-drawn]").wait_for()
                    if file.endswith("dark"):
                        tab.locator("#curves-axis").select_option("time")
                if path.startswith("/compare"):
                    tab.locator("#comparison[data-drawn='1']").wait_for()
                tab.wait_for_timeout(400)
                tab.screenshot(path=PICTURES / f"{file}.png", full_page=path.endswith(run))
                context.close()
        browser.close()
        db.close()
    picture_sources.LIST.write_text(picture_sources.render(), encoding="utf-8")


def furnish(db: Database, home: Path) -> tuple[str, str]:
    """A run that was lost and resumed, and some others around it."""
    samples.completed(db, name="tokenizer-ablation")
    samples.failed_check(db)
    failed = samples.failed_run(db)
    lines = [f"2026-03-01 12:{i // 60:02}:{i % 60:02},120 \x1b[32mINFO\x1b[0m train: step {i}" for i in range(80)]
    text = "\n".join([*lines, "2026-03-01 12:01:20,4 \x1b[33mWARNING\x1b[0m 1.2 GiB left", *samples.LAST_LINES, ""])
    keep(db, home, failed.id, {f"attempts/1/rank-{rank}.log": text.encode() for rank in (0, 1)})
    story = samples.Story(
        db, samples.spec(name="llama-3b", limits={"attempts": 3}), at=datetime.now(UTC) - timedelta(minutes=8)
    ).start()
    place(db, story, {"node-17": "pass", "node-18": "warn"})
    story.tell([samples.project(story.attempt), *samples.preflight()]).move(Stage.RUNNING)
    story.tell(timed(story, 1, 130))
    slow = {"step": 60, "rank": 12, "node": 1, "score": 0.31, "what": "compute"}
    story.tell([Event(phase="WATCH", event="straggler", ts=story.at + timedelta(seconds=60), data=slow)])
    story.at += timedelta(seconds=150)
    story.end_attempt(Reason.NODE_LOST, "the node stopped answering for 120 s").move(Stage.QUEUED)
    with db.write() as conn:
        conn.execute(update(tables.attempts).where(tables.attempts.c.id == story.attempt).values(released_at=story.at))
    story.at += timedelta(seconds=25)
    story.start(2)
    place(db, story, {"node-17": "pass", "node-23": "pass"})
    story.tell([samples.project(story.attempt), *samples.preflight()]).move(Stage.RUNNING)
    story.tell(timed(story, 101, 170))
    share_machine(db, story.attempt)
    return story.id, failed.id


def place(db: Database, story: samples.Story, verdicts: dict[str, str]) -> None:
    """Put the attempt on these nodes, with a pre-flight of each and a price."""
    with db.write() as conn:
        mine = update(tables.attempts).where(tables.attempts.c.id == story.attempt)
        conn.execute(mine.values(handle={"nodes": list(verdicts)}, price_cents_per_hour=6400.0))
        for node, verdict in verdicts.items():
            finding = {"verdict": verdict, "reason": "41 GiB free where checkpoints go", "device": None, "values": {}}
            row = {"attempt": story.attempt, "node": node, "check": "disk_space", "verdict": verdict, "at": story.at}
            conn.execute(insert(tables.check_results).values({**row, "findings": [finding]}))


def share_machine(db: Database, holder: str) -> None:
    """Eight GPUs: two of the run, one of a program by hand, and jobs that wait."""
    now, place = datetime.now(UTC), find_place("local")
    gpus = [Device(id=f"GPU-5e0c{number:04x}", machine="node-17", model="NVIDIA H200") for number in range(8)]
    gpus[7] = replace(gpus[7], used="process 4711 (python3) of alice")
    with db.write() as conn:
        devices.record(conn, place, "gpu", gpus, at=now)
        devices.book(conn, place, holder, {"node-17": tuple(gpu.id for gpu in gpus[:6])}, at=now)
        for name, ranks, level in (("llama-8b", 4, "high"), ("ablation-3", 2, "normal"), ("nightly-eval", 8, "low")):
            wanted = {"name": name, "project": "research", "command": ["python3", "train.py"]}
            spec = parse_spec({**wanted, "resources": {"processes_per_node": ranks}, "queue": {"priority": level}})
            jobs.insert_job(conn, str(uuid.uuid4()), spec, at=now - timedelta(minutes=7 * ranks))
        leases.take(conn, "t", owner="a picture")


def timed(story: samples.Story, first: int, last: int) -> list[Event]:
    events = list(samples.training(first, last, resumed_from=first - 1 or None, end=False))
    return [
        Event(phase=event.phase, event=event.event, ts=story.at + timedelta(seconds=place), data=event.data)
        for place, event in enumerate(events)
    ]


if __name__ == "__main__":
    main()
