"""What is before a job in its queue, as words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

AT_THE_LATEST = " at the latest"  # of a start that waits for the time limit of a job
NEAREST = 5  # jobs before one that are looked at for their names


def say_others(count: int) -> str:
    """`2 jobs of other projects wait`."""
    return f"{count} job of other projects waits" if count == 1 else f"{count} jobs of other projects wait"


def say_before(position: int | None, before: Sequence[str], names: Mapping[str, str]) -> str:
    """`b, a and 3 more`, the nearest first; empty where nothing is before it, or its place is not known.

    `before`: those of the nearest that may be named. Where nobody is farther away, the others are of other projects.
    """
    ahead = (position or 1) - 1
    named = [names.get(job, job[:8]) for job in before]
    rest = max(ahead - len(named), 0)
    if not rest:
        return ", ".join(named)
    jobs = "job" if rest == 1 else "jobs"
    what = f"{jobs} of other projects" if ahead <= NEAREST else "more" if named else jobs
    return f"{', '.join(named)} and {rest} {what}" if named else f"{rest} {what}"
