"""Paths of the REST API that both the server and its client use."""

from __future__ import annotations

from urllib.parse import quote

TRAINING = "/v1/training"
JOBS = f"{TRAINING}/jobs"


def artifact(job_id: str, path: str) -> str:
    """The download path of a stored file of a job."""
    return f"{JOBS}/{job_id}/artifacts/{quote(path)}"
