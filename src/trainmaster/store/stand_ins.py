"""Jobs whose stored spec cannot be read, with a spec of what can be read of it: to end them, and for nothing else.

What an end needs of a spec are its limits (the grace, whether another attempt may follow), what its rented machines may
wait for, and the zone of its times. A field of these that this version does not know is as if it were not stated.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import select

from trainmaster.core.errors import SpecError
from trainmaster.core.schema import build
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.store import attempts, jobs
from trainmaster.store import tables as t
from trainmaster.store.columns import word
from trainmaster.store.database import Database
from trainmaster.store.rows import AttemptRow, JobRow

_BARE: Mapping[str, Any] = {"name": "unreadable", "command": ["true"]}
_SECTIONS = ("limits", "preflight", "rent")


def find_stand_in(db: Database, job_id: str) -> tuple[JobRow, AttemptRow] | None:
    """An open job with its last attempt; None without one, or where more than the spec is of another version.

    The handle names the attempt: one that names another, or none, would end what is not this job's.
    """
    with db.read() as conn:
        row = conn.execute(select(*jobs.COLUMNS).where(t.jobs.c.id == job_id)).mappings().first()
        if row is None or row["stage"] is None:
            return None
        try:
            stage, status = Stage(row["stage"]), Status(row["status"])
            words: dict[str, Any] = {"stage": stage, "status": status, "reason": word(Reason, row["reason"])}
            tried = attempts.list_attempts(db, job_id)
        except (ValueError, TypeError, SpecError):
            return None
    last = tried[-1] if tried else None
    if last is None or not isinstance(last.handle, Mapping) or last.handle.get("attempt") != last.id:
        return None
    stored = row["spec"] if isinstance(row["spec"], str) else json.dumps(row["spec"])
    spec = replace(salvage(stored), name=row["name"], project=row["project"], target=row["target"])
    return JobRow(**{**row, **words, "spec": spec}), last


@functools.lru_cache(maxsize=64)  # it is asked for at every step of the end
def salvage(stored: str) -> JobSpec:
    """A spec with the fields that can be read of those that an end needs."""
    try:
        plain = json.loads(stored)
    except (ValueError, RecursionError):
        plain = None
    known: dict[str, Any] = {}
    if isinstance(plain, Mapping):
        for name in _SECTIONS:
            section = plain.get(name)
            fields = section.items() if isinstance(section, Mapping) else ()
            if sound := {key: value for key, value in fields if _fits({name: {key: value}})}:
                known[name] = sound
        zone = {"zone": plain.get("zone")}
        known |= zone if _fits(zone) else {}
    return build(JobSpec, {**_BARE, **(known if _fits(known) else {})})


def _fits(known: Mapping[str, Any]) -> bool:
    try:
        build(JobSpec, {**_BARE, **known})
    except (SpecError, ValueError, TypeError, RecursionError):
        return False
    return True
