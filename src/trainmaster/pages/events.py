"""Events of a job, a page at a time."""

from __future__ import annotations

from trainmaster.api.events import Events
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.store.database import Database
from trainmaster.store.events import list_events


def read(
    db: Database,
    job_id: str,
    *,
    phase: str | None = None,
    after: tuple[int, int] | None = None,
    limit: int = 1000,
    node: int = 0,
) -> Events:
    """Events of a node in (attempt, offset) order, behind the cursor `after`. `next` stays the same where none is new.

    Each node's events are a sequence of their own, with cursors of their own.
    """
    rows = list_events(db, job_id, phase=phase, after=after, limit=limit, stream=node_file(EVENTS_FILE, node))
    following = rows[-1].cursor if rows else after
    return Events(events=tuple(rows), next="{}:{}".format(*following) if following is not None else None)
