"""What the goodput ledgers of final jobs came to: stored, because their events may be millions.

A row is of the rules that made it. After an upgrade that changed them all rows are made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from trainmaster.core.money import goodput as rules_of_bins
from trainmaster.core.money.goodput.bins import Bin
from trainmaster.core.money.goodput.tally import Tally
from trainmaster.store import costs
from trainmaster.store import goodput as histories
from trainmaster.store import tables as t
from trainmaster.store.columns import Sound, slices, upsert

_J, _L = t.jobs.c, t.ledger_tallies.c


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTally:
    """The tally of a final job. `run`: the job that began its run; `steps`: the highest step that was trained."""

    job_id: str
    project: str
    target: str
    run: str
    steps: int
    tally: Tally


def list_kept(conn: Connection) -> set[str]:
    """Jobs whose tally is stored and of today's rules."""
    return set(conn.execute(select(_L.job_id).where(_L.rules == find_rules())).scalars())


def list_missing(conn: Connection) -> list[str]:
    """Final jobs whose tally is to be made, in the order in which they were made: later ones of a run need earlier."""
    query = select(_J.id).where(_J.stage.is_(None), ~_is_kept()).order_by(_J.created_at, _J.id)
    return list(conn.execute(query).scalars())


def read(conn: Connection, ids: Collection[str]) -> list[KeptTally]:
    """The stored tallies of these jobs."""
    found = []
    run = func.coalesce(Sound(_J.spec)["resume_from"].as_string(), _J.id)
    query = select(_J.id, _J.project, _J.target, run, _L.tally).join(t.ledger_tallies, _L.job_id == _J.id)
    for some in slices(sorted(ids)):
        rows = conn.execute(query.where(_J.id.in_(some), _L.rules == find_rules()))
        for job_id, project, target, begun, text in rows:
            content = json.loads(text)
            tally = Tally(
                ideal_us=content["ideal_us"], measured_us=content["measured_us"],
                jobs=1, unpriced_jobs=content["unpriced_jobs"],
            )  # fmt: skip
            tally.gpu_us |= {Bin(name): value for name, value in content["gpu_us"].items()}
            tally.cents |= {Bin(name): value for name, value in content["cents"].items()}
            found.append(
                KeptTally(job_id=job_id, project=project, target=target, run=begun, steps=content["steps"], tally=tally)
            )
    return found


def keep(conn: Connection, made: Iterable[tuple[str, int, Tally]]) -> None:
    """Store tallies, each with its job and the highest step; those of a job that is gone meanwhile are left out."""
    texts = {job_id: _text(steps, tally) for job_id, steps, tally in made}
    if not texts:
        return
    there = select(_J.id).where(_J.id.in_(list(texts)), _J.stage.is_(None)).with_for_update()
    rows = [
        {"job_id": job_id, "rules": find_rules(), "tally": texts[job_id]} for job_id in conn.execute(there).scalars()
    ]
    if rows:
        conn.execute(upsert(conn.dialect.name, t.ledger_tallies, ("job_id",), ("rules", "tally")), rows)


@functools.cache
def find_rules() -> str:
    """The digest of the code that makes tallies."""
    files = [*Path(rules_of_bins.__path__[0]).glob("*.py"), Path(costs.__file__), Path(histories.__file__)]
    text = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.sha256(text).hexdigest()[:16]


def _text(steps: int, tally: Tally) -> str:
    content: dict[str, Any] = {
        "steps": steps, "ideal_us": tally.ideal_us, "measured_us": tally.measured_us,
        "unpriced_jobs": tally.unpriced_jobs,
        "gpu_us": {bin_.value: value for bin_, value in tally.gpu_us.items() if value},
        "cents": {bin_.value: value for bin_, value in tally.cents.items() if value},
    }  # fmt: skip
    return json.dumps(content)


def _is_kept() -> ColumnElement[bool]:
    return select(_L.job_id).where(_L.job_id == _J.id, _L.rules == find_rules()).exists()
