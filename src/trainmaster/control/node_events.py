"""Events of every node of an attempt: each node's file is a stream of its own, read from its own offset.

The first node's stream is `events.jsonl`, that of node N is `events.node-N.jsonl` (core/plan.py). Training records are
derived from the first one, results of checks from all of them (store/projection.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from trainmaster.control.context import Context
from trainmaster.control.ingest import ingest, mark_unreadable
from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.core.events import Line
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.core.results import Overall
from trainmaster.core.spec import zone_of
from trainmaster.store import events
from trainmaster.store.database import Database
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import Handle, HasNodes


async def ingest_nodes(
    context: Context, job: JobRow, attempt: AttemptRow, handle: Handle, *, first: int = 0, last: bool = False
) -> bool:
    """One pass over the event files of all nodes, from node `first` on. True if each was read to its end.

    Every file is read before the error of one is raised: a node that does not answer does not hold up the others.
    """
    target = context.load(job.target)
    nodes = target.count_nodes(handle) if isinstance(target, HasNodes) else 1
    passes = [
        _ingest_file(context, job, attempt, handle, node_file(EVENTS_FILE, node), last=last)
        for node in range(first, max(nodes, 1))
    ]
    results = await asyncio.gather(*passes, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return all(results)


async def _ingest_file(
    context: Context, job: JobRow, attempt: AttemptRow, handle: Handle, stream: str, *, last: bool
) -> bool:
    target = context.load(job.target)

    async def read(offset: int, limit: int) -> bytes:
        return await context.call("read", target.read(handle, stream, offset=offset, limit=limit))

    try:
        zone = zone_of(job.spec, EVENTS_FILE)
        return await ingest(
            context.db, attempt.id, read, zone=zone, stream=stream, last=last, reads=context.reads, group=context.lines
        )
    except Unreachable:
        raise
    except TargetError as refused:
        # The target is there and refuses this file (a folder or a pipe stands in its place): the job goes on.
        await asyncio.to_thread(mark_unreadable, context.db, attempt.id, str(refused), stream=stream)
        return True


def has_passed_checks(db: Database, job: JobRow, attempt: AttemptRow) -> bool:
    """Whether the node has said that its checks let the workload start. Read from the rows: a restart forgets."""
    if job.spec.preflight.level == 0:
        return True
    with db.read():
        alive = events.find_event(db, attempt.id, phase="HEARTBEAT", event="alive")
        row = events.find_event(db, attempt.id, phase="PREFLIGHT", event="end")
    if alive is not None and alive.data.get("ranks"):
        return True  # ranks run; the end of the pre-flight may have been lost with a truncated file
    go: set[Any] = {Overall.PASS, Overall.WARN}
    if job.spec.preflight.allow_incomplete:
        go.add(Overall.INCOMPLETE)
    return row is not None and row.data.get("overall") in go


def may_pass_checks(lines: Iterable[Line]) -> bool:
    """Whether a line is among them that `has_passed_checks` looks for."""
    told = [line.event for line in lines if line.event is not None]
    return any(
        (event.phase, event.event) == ("PREFLIGHT", "end")
        or ((event.phase, event.event) == ("HEARTBEAT", "alive") and event.data.get("ranks"))
        for event in told
    )
