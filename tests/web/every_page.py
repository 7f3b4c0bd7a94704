"""Every page of the dashboard by its route, a server with something of everything on it, and the same made hostile."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from sqlalchemy import JSON, String, update

from pages import samples
from report.test_hostile import HOSTILE, hostile_events
from trainmaster.control.queueing import sets
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.events import Event
from trainmaster.core.plan import rank_log
from trainmaster.core.roles import Role
from trainmaster.core.schema import build, describe
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Stage
from trainmaster.queueing.state import Device
from trainmaster.store import artifacts, attempts, audit, costs, people, tables, webhooks
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from trainmaster.targets import find_place
from trainmaster.web.sections.run import TABS
from web.furnished import NOBODY, keep
from web.test_nodes_page import cluster
from web.test_run_tabs import LOG

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
LONG = "W" * 300  # a word that nothing breaks
# What a route needs beside its path. `{node}` and the like are parts that `furnish` names.
PAGES = {
    "/": ("/", "/?status=failed", "/?find=llama", "/?by=ann", "/?find=nothing+fits"),
    "/search": ("/search", "/search?q={word}"),
    "/jobs/{uuid}": ("/jobs/{uuid}", "/jobs/{failed}", f"/jobs/{NOBODY}"),
    "/jobs/{uuid}/report": ("/jobs/{uuid}/report",),
    "/jobs/{uuid}/logs": ("/jobs/{uuid}/logs", "/jobs/{failed}/logs?stream=rank-0.log",
                          "/jobs/{failed}/logs?stream=rank-0.log&find=a%28&regex=true", "/jobs/{failed}/logs?find=e"),
    "/jobs/{uuid}/{tab}": tuple(f"/jobs/{{failed}}/{tab}" for tab, _ in TABS if tab not in ("", "logs")),
    "/sets/{set_id}": ("/sets/{set_id}",), "/queue": ("/queue",), "/nodes": ("/nodes", "/nodes?find=nothing"),
    "/nodes/one": ("/nodes/one?node={node}", "/nodes/one?gpu={gpu}"), "/nodes/drain": ("/nodes/drain?node={node}",),
    "/nodes/readmit": ("/nodes/readmit?node={node}",),
    "/compare": ("/compare", "/compare?jobs={uuid},{failed}"), "/cost": ("/cost", "/cost?month=all"),
    "/settings": ("/settings",), "/login": ("/login",),
}  # fmt: skip
# Answers that are no page: parts of one, files, streams, a redirect, and the one-time link.
NO_PAGES = {
    "/jobs/{uuid}/part", "/jobs/{uuid}/curves.csv", "/jobs/{uuid}/logs/follow", "/jobs/{uuid}/logs/download",
    "/jobs/{uuid}/logs/first-error", "/compare/curves", "/compare.csv", "/enter/{code}", "/static/{name}",
    "/v1/openapi.json",
}  # fmt: skip
# Columns whose values are no free text: keys, words of a fixed list, names that the server checks, and what is parsed.
KEPT = {
    "jobs": {"id", "name", "project", "target", "status", "stage", "reason", "spec", "aggregate", "lease_token",
             "submit_key", "submit_hash"},
    "attempts": {"id", "job_id", "report", "reason", "stop_reason"}, "streams": {"attempt", "stream", "tail"},
    "events": {"attempt", "stream", "phase", "event"},  # hostile ones are told, see `furnish`
    "transitions": {"job_id", "stage_from", "stage_to", "status", "reason"},
    "instances": {"attempt", "target", "nonce", "state"}, "iterations": {"job_id", "aggregate"},
    "steps": {"kind", "aggregate"}, "epochs": {"attempt"}, "evals": {"job_id", "attempt", "stream"},
    "check_results": {"attempt", "verdict", "check"}, "artifacts": {"job_id", "attempt", "path", "sha256"},
    "tokens": {"hash", "role", "project"}, "blobs": {"project", "sha256", "place"},
    "workdirs": {"project", "sha256", "manifest"}, "audit": set(), "budgets": {"project", "period"},
    "webhooks": {"id", "project"}, "outbox": {"topic", "project", "job_id"}, "deliveries": {"channel"},
    "known_targets": {"name", "word"}, "target_grants": {"target", "project", "user", "identity"},
    "ledger_tallies": {"job_id", "rules", "tally"},
    "devices": {"place", "kind", "attempt"}, "machines": {"place"}, "queue_orders": {"place", "waits"},
    "shares": {"project"}, "job_sets": {"id", "name", "project"}, "set_trials": {"set_id", "spec", "job_id", "word"},
    "job_after": {"job_id", "before", "name"}, "searches": {"set_id", "search", "template", "word"},
    "schedules": {"set_id", "schedule", "trials", "workdir"},
    "search_trials": {"set_id", "state", "attributes"}, "search_reports": {"set_id"},
    "people": {"issuer", "subject", "grants"}, "sessions": {"hash", "role", "project"}, "token_owners": set(),
}  # fmt: skip
_KEYS = {"verdict", "check", "folder", "attempt", "reason", "ended_at", "planned"}  # of JSON, in the same sense


def addresses(app: FastAPI, parts: Mapping[str, str]) -> list[str]:
    """The address of every page, from the routes of the application; a route that PAGES does not have fails."""
    routes = {
        re.sub(r":path", "", route.path)
        for route in app.routes
        if "GET" in (getattr(route, "methods", None) or ()) and not getattr(route, "include_in_schema", False)
    }
    assert routes - NO_PAGES == PAGES.keys(), "a new page? Write its address into PAGES"
    quoted = {name: quote(part, safe="") for name, part in parts.items()}
    return [address.format(**quoted) for listed in PAGES.values() for address in listed]


def furnish(db: Database, home: Path) -> dict[str, str]:
    """Something of everything in the project `research`; what the parts of addresses are."""
    cluster(db)
    failed, going = samples.failed_run(db), samples.resumed(db)
    place = home / "going"
    place.mkdir()
    (place / rank_log(0)).write_bytes(LOG)
    keep(
        db, home, failed.id, {f"attempts/1/{rank_log(0)}": LOG, f"attempts/1/{rank_log(1)}": LOG, "outputs/m.bin": b"m"}
    )
    sweep = {"name": "sweep", "project": "research", "command": ["x"], "matrix": {"env.A": ["1", "2"]}}
    made = sets.submit_set(db, parse_sweep(sweep))
    gpus = [
        Device(id=f"GPU-{n}", machine="gpu-1", model="NVIDIA H200", used="python3" if n else None) for n in range(4)
    ]
    search = {key: value for key, value in sweep.items() if key != "matrix"} | {"name": "search"}
    sets.submit_set(db, parse_sweep({**search, "search": {"parameters": {"env.A": ["1", "2"]}, "sampler": "grid"}}))
    timed = {key: value for key, value in sweep.items() if key != "matrix"} | {"name": "timed"}
    sets.submit_set(db, parse_sweep({**timed, "schedule": {"cron": "0 3 * * *"}}))
    with db.write() as conn:
        people.sign_in(
            conn, issuer="https://id.example.org", subject="1", name="ann@example.org",
            grants=[(Role.USER, "research")], at=AT, expires_at=datetime.now(UTC) + timedelta(hours=1),
        )  # fmt: skip
        attempts.set_handle(conn, going.attempt, {"attempt": going.attempt, "folder": str(place), "nodes": ["node-17"]})
        attempts.set_handle(conn, failed.attempt, {"attempt": failed.attempt, "folder": "/x", "nodes": ["node-17"]})
        conn.execute(update(tables.attempts).values(price_cents_per_hour=6400.0))
        for period in costs.PERIODS:
            costs.set_budget(conn, "research", period, 10_000, at=AT)
        webhooks.insert_webhook(conn, NOBODY, url="https://hooks.example.org/x", project="research", topics=[], at=AT)
        devices.record(conn, find_place("local"), "gpu", gpus, at=datetime.now(UTC))
        audit.record(conn, who="ann", action="job.submit", subject=f"job:{failed.id}", detail={"why": "to see"})
    return {
        "uuid": going.id, "failed": failed.id, "set_id": made.id, "node": "node-00", "gpu": "serial:1652000000002",
        "word": "memory",
    }  # fmt: skip


def furnish_hostile(db: Database, home: Path) -> dict[str, str]:
    """The same with hostile text in every field: of every table, every event, every log line and a name of a file."""
    parts = furnish(db, home)
    spec = hostile_spec()
    story = samples.Story(db, spec).start().move(Stage.RUNNING).tell(hostile_events())
    story.tell(
        Event(phase="STEP", event="metrics", data={"step": n, "loss": 2.0, f"{HOSTILE}{LONG}": n}) for n in range(9)
    )
    line = b"\x1b[31m" + (HOSTILE + LONG).encode() + b"\x1b]0;title\x07\n"
    (home / "storage" / "jobs" / parts["failed"] / "attempts" / "1" / rank_log(0)).write_bytes(line * 50)
    with db.write() as conn:  # a storage refuses most of these names; one that is shared holds what others put there
        artifacts.insert_artifact(
            conn, job_id=parts["failed"], attempt=None, kind="output", path=f"outputs/{HOSTILE}{LONG}", size_bytes=1,
            sha256="0" * 64, at=AT,
        )  # fmt: skip
    (home / "going" / rank_log(0)).write_bytes(line * 50)
    poison(db)
    return {
        **parts,
        "uuid": story.id,
        "node": spoil("node-00"),
        "gpu": f"serial:{spoil('1652000000002')}",
        "word": "script",
    }


def hostile_spec() -> JobSpec:
    """A spec with hostile text in every field that takes it."""
    document: dict[str, Any] = {"name": "n" * 63, "project": "research", "train": {"steps": 200}}
    took = 0
    for row in describe(JobSpec):
        value: Any = {"text": HOSTILE, "list of text": [HOSTILE], "mapping to text": {"A": HOSTILE}}.get(row.type)
        changed = copy.deepcopy(document)
        here, (*parents, last) = changed, row.path.split(".")
        for name in parents:
            here = here.setdefault(name, {})
        if value is None or last in here or not isinstance(here, dict):
            continue
        here[last] = value
        try:
            build(JobSpec, changed)
        except TrainmasterError:
            continue  # it is checked, and refused
        document, took = changed, took + 1
    assert took > 10, "few fields took it: is the walk over the schema right?"
    return build(JobSpec, document)


def poison(db: Database) -> None:
    """Hostile text in every column of every row that is not in KEPT."""
    assert KEPT.keys() == tables.metadata.tables.keys(), "a new table: say which of its columns are no free text"
    with db.write() as conn:
        for table in tables.metadata.sorted_tables:
            assert KEPT[table.name] <= set(table.c.keys()), table.name
            free = [
                column
                for column in table.c
                if column.name not in KEPT[table.name]
                and (isinstance(column.type, String | JSON) or isinstance(getattr(column.type, "impl", None), String))
            ]
            if not free:
                continue
            for row in conn.execute(table.select()).mappings().all():
                here = [column == row[column.name] for column in table.primary_key.columns]
                values = {column.name: _spoil(row[column.name], column) for column in free}
                conn.execute(update(table).where(*here).values(values))


def _spoil(value: Any, column: Any) -> Any:
    if isinstance(column.type, JSON):
        return spoil_json(value)
    return spoil(value, most=getattr(column.type, "length", None)) if value else value


def spoil(text: str, *, most: int | None = None) -> str:
    """Hostile text in place of another one. The beginning stays, so that equal texts are equal and others differ."""
    return f"{text[:16]}{HOSTILE}{LONG}"[:most]


def spoil_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item if key in _KEYS else spoil_json(item) for key, item in value.items()} | {HOSTILE: 1.5}
    if isinstance(value, list):
        return [spoil_json(item) for item in value]
    return spoil(value) if isinstance(value, str) else value
