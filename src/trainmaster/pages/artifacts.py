"""Stored files of a job."""

from __future__ import annotations

from trainmaster.api import paths
from trainmaster.api.codec import fill
from trainmaster.api.files import Artifact, Artifacts
from trainmaster.store import artifacts
from trainmaster.store.database import Database


def read(db: Database, job_id: str) -> Artifacts:
    """Every stored file of a job: project file, logs, events, outputs."""
    rows = artifacts.list_artifacts(db, job_id)
    return Artifacts(artifacts=tuple(fill(Artifact, row, url=paths.artifact(row.job_id, row.path)) for row in rows))
