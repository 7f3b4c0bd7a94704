"""All that a database says of its jobs, without what may differ between two runs: times, tokens, numbers of rows.

Two runs of the same workload give the same ledger, however often the control plane died in one of them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from sqlalchemy import Table, select

from trainmaster.core.events import Event, Line
from trainmaster.store import tables
from trainmaster.store.capacity.event_quota import weigh
from trainmaster.store.columns import UtcTime, metadata
from trainmaster.store.database import Database

# Measured anew in each run, or of whichever process worked last.
_OWN = {
    "jobs": {"time_taken", "aggregate", "lease_token", "lease_owner", "lease_until"},
    "check_results": {"took_s"},
    "events": {"offset", "length", "seq"},  # a heartbeat more or less moves them
    "streams": {"offset", "tail"},
    "iterations": {"aggregate"},  # they hold times
    "steps": {"aggregate"},
    "evals": {"offset"},
    "outbox": {"spread_at"},  # by a clock of its own, beside the jobs
}
_ORDERED = ("transitions", "outbox")  # of these the order is part of what they tell


def read(db: Database, job_id: str, home: Path) -> dict[str, list[str]]:
    """Table → its rows. The database is the job's alone."""
    found: dict[str, list[str]] = {}
    with db.read() as conn:
        iterations = {row.id: row.number for row in conn.execute(select(tables.iterations))}
        weights: Counter[tuple[str, str]] = Counter()
        for line in conn.execute(select(tables.events)):
            weights[line.attempt, line.stream] += _weigh(line)
        for table in metadata.sorted_tables:
            query = select(table).order_by(table.c.id) if table.name in _ORDERED else select(table)
            rows = [dict(row) for row in conn.execute(query).mappings() if row.get("phase") != "HEARTBEAT"]
            if table is tables.streams:  # a heartbeat more or less moves it
                rows = [{**row, "kept": row["kept"] == weights[row["attempt"], row["stream"]]} for row in rows]
            told = [_tell(table, row, iterations).replace(job_id, "JOB").replace(str(home), "HOME") for row in rows]
            found[table.name] = told if table.name in _ORDERED else sorted(told)
    return found


def _weigh(row: Any) -> int:
    told = Event(phase=row.phase, event=row.event) if row.phase is not None else None
    return weigh(Line(offset=row.offset, length=row.length, event=told, fault=row.fault, text=row.text))


def _tell(table: Table, row: dict[str, Any], iterations: dict[int, int]) -> str:
    kept = {name: value for name, value in row.items() if name not in _OWN.get(table.name, ())}
    for column in table.columns:
        if isinstance(column.type, UtcTime) and column.name in kept:
            kept[column.name] = row[column.name] is not None  # that it happened is compared, when it did is not
    if isinstance(row.get("id"), int):
        del kept["id"]
    if "iteration_id" in kept:
        kept["iteration_id"] = iterations[kept["iteration_id"]]
    if table.name == "artifacts" and row["kind"] != "output":
        del kept["size_bytes"], kept["sha256"]  # they hold times, or the job's id
    for name, inner in (("exit", "ended_at"), ("payload", "at"), ("data", "time_taken")):
        if isinstance(kept.get(name), dict):
            kept[name] = {key: value for key, value in kept[name].items() if key != inner}
    return json.dumps(kept, sort_keys=True, default=str)
