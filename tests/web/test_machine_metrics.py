"""Metrics of nodes, devices and waiting jobs, and the alert rules over them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from sqlalchemy import insert
from starlette.testclient import TestClient

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.spec import parse_spec
from trainmaster.pages.parts.machine_counts import MOST_TARGETS
from trainmaster.queueing.state import Device
from trainmaster.store import jobs
from trainmaster.store import tables as t
from trainmaster.store.capacity import devices, machines
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.test_health import figures
from web.test_nodes_page import checks, run

ROOT = Path(__file__).parents[2]


def over(db: Database, home: Path) -> TestClient:
    app = create_app(db, home, reconcile=False)
    app.state.machines.refresh()
    return TestClient(app, base_url=BASE, client=LOCAL)


def test_nodes_devices_and_waiting_jobs_are_counted(any_db: Database, tmp_path: Path) -> None:
    db, now = any_db, datetime.now(UTC)
    run(db, "m0", checks(["1"], bad="1"), target="ssh:/lab.yaml")
    run(db, "m1", checks(["2"]), target="ssh:/lab.yaml")
    rented = run(db, "gone", checks(["3"], bad="3"), target="lambda")
    returned = {"nonce": "n", "target": "lambda", "state": "gone", "created_at": now, "gone_at": now}
    gpus = [Device(id=f"GPU-{n}", machine=f"m{n // 2}", used="a game" if n == 1 else None) for n in range(6)]
    with db.write() as conn:
        conn.execute(insert(t.instances).values(attempt=rented.attempt, **returned))
        devices.record(conn, "ssh:/lab.yaml", "gpu", gpus, at=now)
        machines.drain(conn, "ssh:/lab.yaml", "m2", reason="a fan", by="eve", at=now - timedelta(hours=1))
        for number in range(2):
            job_id = f"{number:08}-0000-4000-8000-000000000000"
            spec = parse_spec({"name": "waits", "command": ["x"]})
            jobs.insert_job(conn, job_id, spec, at=now - timedelta(minutes=10 * number))
    get = figures(over(db, tmp_path))
    assert get('nodes{drained="false",verdict="fail"}') == get('nodes{drained="false",verdict="pass"}') == 1
    assert get('nodes{drained="true",verdict="unchecked"}') == 1
    assert 3600 <= get("drained_seconds") < 3700
    labels = '{kind="gpu",target="ssh:/lab.yaml"}'
    assert [get(f"devices{word}{labels}") for word in ("", "_used", "_free")] == [6, 1, 3]
    assert get("jobs_waiting") == 2 and 600 <= get("longest_wait_seconds") < 700


def test_targets_without_number_are_few_series(db: Database, tmp_path: Path) -> None:
    with db.write() as conn:
        for number in range(MOST_TARGETS + 5):
            gpus = [Device(id=f"GPU-{number}", machine="m")]
            devices.record(conn, f"ssh:/{number}.yaml", "gpu", gpus, at=samples.T0)
    client = over(db, tmp_path)
    assert figures(client)('devices{kind="gpu",target="(other)"}') == 5
    assert client.get("/metrics").text.count("\ntrainmaster_devices{") == MOST_TARGETS + 1


def test_counts_are_made_beside_the_requests(db: Database, tmp_path: Path) -> None:
    app = create_app(db, tmp_path, reconcile=False)
    client = TestClient(app, base_url=BASE, client=LOCAL)
    assert "\ntrainmaster_nodes{" not in client.get("/metrics").text, "nobody waits for them"
    with client:
        wait_until(lambda: client.get("/metrics").text.count("\ntrainmaster_nodes{") == 12)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_every_metric_of_the_alert_rules_and_of_the_guide_exists(db: Database, tmp_path: Path) -> None:
    samples.Story(db).start().tell([Event(phase="STEP", event="metrics", ts=samples.T0, data={"step": 1})])
    with db.write() as conn:
        devices.record(conn, "local", "slot", [Device(id="m/slot-0", machine="m")], at=samples.T0)
        row = {"nonce": "n", "target": "lambda", "state": "ready", "created_at": samples.T0}
        attempt = conn.execute(t.attempts.select()).first()
        assert attempt is not None
        conn.execute(insert(t.instances).values(attempt=attempt.id, **row))
    client = over(db, tmp_path)
    client.app.state.ledgers.refresh()  # type: ignore[attr-defined]
    names = {line.partition("{")[0].partition(" ")[0] for line in client.get("/metrics").text.splitlines()}
    folder = ROOT / "deploy" / "monitoring"
    (group,) = yaml.safe_load((folder / "prometheus-alerts.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert len(rules) == 5 and all(rule["annotations"].keys() == {"summary", "action"} for rule in group["rules"])
    used = {name for expr in rules.values() for name in re.findall(r"trainmaster_\w+", expr)}
    guide = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    used |= set(re.findall(r"`(trainmaster_\w+)`", guide))
    assert used <= names, used - names
    (scrape,) = yaml.safe_load((folder / "prometheus.yaml").read_text())["scrape_configs"]
    assert scrape["metrics_path"] == "/metrics" and "credentials_file" in scrape["authorization"]
