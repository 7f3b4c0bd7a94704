"""Attempts of a job."""

from __future__ import annotations

from trainmaster.api.jobs import Attempts
from trainmaster.pages.parts import shapes
from trainmaster.store import attempts
from trainmaster.store.database import Database

Page = Attempts


def read(db: Database, job_id: str) -> Attempts:
    """Every attempt of a job, in order."""
    return Attempts(attempts=tuple(shapes.attempt(row) for row in attempts.list_attempts(db, job_id)))
