"""Events of every node of an attempt: each node's file is a stream of its own, read from its own offset.

The first node's stream is `events.jsonl`, that of node N is `events.node-N.jsonl` (core/plan.py). Training records are
derived from the first one, results of checks from all of them (store/projection.py).
"""

from __future__ import annotations

import asyncio

from trainmaster.control.context import Context
from trainmaster.control.ingest import ingest, mark_unreadable
from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.core.spec import zone_of
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
        return await ingest(context.db, attempt.id, read, zone=zone, stream=stream, last=last)
    except Unreachable:
        raise
    except TargetError as refused:
        # The target is there and refuses this file (a folder or a pipe stands in its place): the job goes on.
        await asyncio.to_thread(mark_unreadable, context.db, attempt.id, str(refused), stream=stream)
        return True
