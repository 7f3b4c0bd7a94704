"""The whole way, as a user starts it: `trainmaster demo` undisturbed, its control plane killed, and interrupted."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from trainmaster.core.events import split
from trainmaster.core.plan import ATTEMPT_VARIABLE

STEPS = 45
pytestmark = pytest.mark.timeout(300)


class Demo:
    """One run of the demo over its own home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "160"}
        command = [sys.executable, "-m", "trainmaster", "demo", "--steps", str(STEPS), "--home", str(home)]
        self.output = home / "output.txt"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> int:
        return self.process.wait(timeout=240)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.05)

    def steps_seen(self) -> int:
        return len(self.query("SELECT 1 FROM events WHERE phase = 'STEP'"))

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        if not (self.home / "trainmaster.db").exists():
            return []
        with sqlite3.connect(f"file:{self.home / 'trainmaster.db'}?mode=ro", uri=True) as db:
            try:
                return db.execute(sql).fetchall()
            except sqlite3.OperationalError:  # the tables are not there yet
                return []
            finally:
                db.commit()

    def server_pid(self) -> int:
        return int(json.loads((self.home / "server.json").read_text())["pid"])

    def events_file(self) -> bytes:
        (path,) = self.home.glob("jobs/*/attempts/1/events.jsonl")
        return path.read_bytes()

    def rows(self) -> list[tuple[Any, ...]]:
        """What was ingested, without what differs between two runs of the same job: ids, times, rates, heartbeats.

        Saves go on beside training: when one ends, and what is then said of the loss bound, depends on the disk.
        """
        rows = self.query(
            "SELECT phase, event, epoch, json_extract(data, '$.step'), json_extract(data, '$.loss'), "
            "json_extract(data, '$.check'), json_extract(data, '$.lr'), json_extract(data, '$.grad_norm') "
            "FROM events WHERE phase NOT IN ('HEARTBEAT', 'CHECKPOINT') ORDER BY \"offset\""
        )
        saved = self.query(
            "SELECT phase, event, json_extract(data, '$.step') FROM events "
            "WHERE phase = 'CHECKPOINT' AND event <> 'bound' ORDER BY 3, 2"
        )
        return [*rows, *saved]

    def leftovers(self) -> list[str]:
        """Processes of this home's attempts that still run."""
        found = []
        attempts = [row[0].encode() for row in self.query("SELECT id FROM attempts")]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environ = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if any(f"{ATTEMPT_VARIABLE}=".encode() + attempt in environ for attempt in attempts):
                    found.append(entry.name)
        return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    demo = Demo(tmp_path_factory.mktemp("demo") / "home")
    assert demo.wait() == 0, demo.output.read_text()
    return demo


def test_the_demo_passes_and_says_where_to_look(undisturbed: Demo) -> None:
    text = undisturbed.output.read_text()
    assert "PASS job completed" in text
    (report,) = undisturbed.home.glob("jobs/*/report.html")
    assert str(report) in text
    assert "trainmaster serve --home" in text
    assert undisturbed.leftovers() == []


def test_the_report_opens_in_a_browser(undisturbed: Demo, tab: Page) -> None:
    (report,) = undisturbed.home.glob("jobs/*/report.html")
    tab.goto(report.as_uri())
    expect(tab.locator("h1")).to_have_text("demo")
    figure = tab.get_by_role("img", name="Loss").first
    expect(figure).to_be_visible()
    points = figure.locator("path, polyline").evaluate_all(
        "found => Math.max(...found.map(one => (one.getAttribute('d') || one.getAttribute('points') || '').length))"
    )
    assert points > 200, "the loss curve has no points"
    tab.evaluate(
        "document.querySelectorAll('details').forEach(one => one.open = true)"
    )  # what does not apply is folded
    for check in ("cpu", "disk_space", "gpu_count", "memlock", "ram", "shm"):
        expect(tab.locator("table").get_by_text(check, exact=True).first).to_be_visible()


def test_every_line_of_the_file_is_one_row(undisturbed: Demo) -> None:
    lines = split(undisturbed.events_file(), offset=0, zone=UTC, last=True)
    rows = undisturbed.query('SELECT "offset", length, phase, event, fault FROM events ORDER BY "offset"')
    assert rows == [(x.offset, x.length, x.event and x.event.phase, x.event and x.event.event, x.fault) for x in lines]
    assert undisturbed.steps_seen() == STEPS


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
def test_a_killed_control_plane_changes_nothing(undisturbed: Demo, tmp_path: Path) -> None:
    demo = Demo(tmp_path / "home")
    for steps in (5, 20):
        demo.wait_until(lambda steps=steps: demo.steps_seen() >= steps)  # type: ignore[misc]
        os.kill(demo.server_pid(), signal.SIGKILL)
        (demo.home / "server.json").unlink(missing_ok=True)
        demo.wait_until((demo.home / "server.json").exists)
    assert demo.wait() == 0, demo.output.read_text()
    assert demo.output.read_text().count("the control plane died") == 2
    assert demo.query("SELECT count(*) FROM attempts") == [(1,)]
    assert demo.rows() == undisturbed.rows()
    assert demo.leftovers() == []


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
def test_ctrl_c_cleans_up(tmp_path: Path) -> None:
    demo = Demo(tmp_path / "home")
    demo.wait_until(lambda: demo.steps_seen() >= 3)
    server = demo.server_pid()
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait() == 130, demo.output.read_text()
    assert demo.query("SELECT status FROM jobs") == [("cancelled",)]
    assert demo.leftovers() == []
    assert not Path(f"/proc/{server}").exists()
    assert demo.output.read_text().count("pre-flight") == 1, "what was shown is not shown again"
