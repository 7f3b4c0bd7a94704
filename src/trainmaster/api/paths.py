"""Paths of the REST API that both the server and its client use."""

from __future__ import annotations

from urllib.parse import quote

TRAINING = "/v1/training"
JOBS = f"{TRAINING}/jobs"
JOBS_CHECK = f"{JOBS}/check"


def chunks(project: str, rest: str) -> str:
    """A path below the chunks of a project's working folders: `missing`, or a SHA-256."""
    return f"/v1/projects/{quote(project, safe='')}/chunks/{rest}"


def workdir(project: str, sha256: str) -> str:
    """The path of a snapshot of a working folder."""
    return f"/v1/projects/{quote(project, safe='')}/workdirs/{sha256}"


def artifact(job_id: str, path: str) -> str:
    """The download path of a stored file of a job."""
    return f"{JOBS}/{job_id}/artifacts/{quote(path)}"
