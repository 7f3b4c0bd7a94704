"""Transitions of a job: every change of its stage, with the reason."""

from __future__ import annotations

from trainmaster.api.jobs import Transitions
from trainmaster.store.database import Database
from trainmaster.store.jobs import list_transitions

Page = Transitions


def read(db: Database, job_id: str) -> Transitions:
    """Every transition of a job, in order."""
    return Transitions(transitions=tuple(list_transitions(db, job_id)))
