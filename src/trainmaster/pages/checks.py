"""Pre-flight checks of a job, on each node of each attempt."""

from __future__ import annotations

from trainmaster.api.iterations import Checks
from trainmaster.store import nodes
from trainmaster.store.database import Database

Page = Checks


def read(db: Database, job_id: str) -> Checks:
    """Every pre-flight check of a job."""
    return Checks(checks=tuple(nodes.list_checks(db, job_id)))
