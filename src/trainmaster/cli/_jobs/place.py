"""Where a job waits, as rows of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

if TYPE_CHECKING:
    from trainmaster.cli._jobs import Jobs

_MOST = 200


def find_place(jobs: Jobs, job_id: str, project: str) -> dict[str, str]:
    """Its place with what is before it, why, and its expected start, as markup; nothing where it has no place."""
    from trainmaster.queueing.words import AT_THE_LATEST, say_before

    lines = {line.job_id: line for line in jobs.queue(project=project, limit=_MOST).jobs}
    if (line := lines.get(job_id)) is None or line.position is None:
        return {}
    ahead = say_before(line.position, line.before, {job: each.name for job, each in lines.items()})
    place = f"{line.position} in its queue" + (f"; before it: {escape(ahead)}" if ahead else "")
    latest, start = AT_THE_LATEST if line.expected_latest else "", "not known"
    if line.expected_at is not None:
        start = f"expected {line.expected_at.astimezone():%Y-%m-%d %H:%M}{latest}"
    return {"place": place, "waits for": escape(line.reason), "start": start}
