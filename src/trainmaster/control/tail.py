"""Fast path for jobs that are checked or run: poll, read new events, commit many jobs' lines in one transaction.

Most visits to most of these jobs find nothing, or a line. A stage handler (rows read, threads, its own commit) costs a
hundred times what such a visit needs. Whatever else is found (another target state, a message, the end of the checks, a
deadline, a stall, a backlog, another file, an error) is left to the stage handler: `stage_handlers.py` alone decides
what becomes of a job.

Nothing is remembered that rows do not hold: the spec and the handle of an attempt on its node do not change. What is
known of a job is read again after each of its steps: a step that was cut off leaves nothing unseen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import tzinfo

from trainmaster.control import quotas
from trainmaster.control.context import Context
from trainmaster.control.ingest import LINE_LIMIT, cut, tail_of
from trainmaster.control.node_events import has_passed_checks, ingest_nodes, may_pass_checks
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.spec import zone_of
from trainmaster.core.states import Stage, TargetState
from trainmaster.store.capacity import event_quota
from trainmaster.store.events import Chunk
from trainmaster.store.leases import RunningRow
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import Handle, HasNodes, Target

_MOST_BYTES = 64 << 10  # of one visit; more is a backlog and the stage handler's work
_QUIET_TICKS = 2  # a running job without new lines is visited at every second tick

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Facts that do not change between two steps of a job."""

    job: JobRow
    attempt: AttemptRow
    handle: Handle
    target: Target
    zone: tzinfo
    later_nodes: bool  # it runs on several machines, each with a file of its own
    room: float  # for events of this stream in the quota of the job, when it was first visited


class Tail:
    """Visits of one reconciler to its jobs that are checked or run."""

    def __init__(self, context: Context, *, tick_s: float) -> None:
        self._context = context
        self._quiet_s = (_QUIET_TICKS - 0.5) * tick_s
        self._known: dict[str, _Known] = {}  # by attempt
        self._not_before: dict[str, float] = {}  # by attempt

    def choose(self, rows: Collection[RunningRow]) -> list[RunningRow]:
        """The jobs to visit now; state of attempts that no longer run is dropped."""
        now, here = time.monotonic(), {row.attempt for row in rows}
        self._known = {attempt: known for attempt, known in self._known.items() if attempt in here}
        self._not_before = {attempt: when for attempt, when in self._not_before.items() if attempt in here}
        return [row for row in rows if self._not_before.get(row.attempt, 0.0) <= now]

    async def poll(self, row: RunningRow) -> bool:
        """Ingest new lines of a job. True if it needs its stage handler."""
        try:
            needed = await self._visit(row)
        except Exception as error:
            log.debug("job %s: %s", row.job_id, error)
            needed = True  # the stage handler meets the same error and handles it
        if needed:
            self._known.pop(row.attempt, None)
        return needed

    async def _visit(self, row: RunningRow) -> bool:
        known = self._known.get(row.attempt)
        if known is None or known.job.stage is not row.stage:
            known = await self._learn(row)
            if known is None:
                return True
            self._known[row.attempt] = known
        if await self._needs_handler(known, row):
            return True
        return await self._read(known, row) or await self._read_later_nodes(known)

    async def _learn(self, row: RunningRow) -> _Known | None:
        """What the rows hold of a job; None if it needs its stage handler."""
        context = self._context
        job, attempt = await context.reads.find(context.db, row.job_id)
        if job is None or job.stage is not row.stage:
            return None
        if attempt is None or attempt.id != row.attempt or attempt.handle is None:
            return None
        waits = attempt.report is TargetState.WAITING
        told = row.offset > 0 or job.spec.preflight.level == 0  # else no line is kept that could say so
        may_go = job.stage is Stage.CHECKING and not waits and told
        if may_go and await context.read(has_passed_checks, job, attempt):
            return None
        target, zone = context.load(job.target), zone_of(job.spec, EVENTS_FILE)
        later = isinstance(target, HasNodes) and target.count_nodes(attempt.handle) > 1
        # A first attempt on one node has one stream.
        alone = attempt.number == 1 and not later
        kept = row.kept if alone else await context.read(event_quota.count_kept, attempt.id)
        return _Known(
            job=job, attempt=attempt, handle=attempt.handle, target=target, zone=zone, later_nodes=later,
            room=quotas.read_events_limit() - kept + row.kept,
        )  # fmt: skip

    async def _needs_handler(self, known: _Known, row: RunningRow) -> bool:
        poll = await self._context.call("poll", known.target.poll(known.handle))
        if poll.state is not row.report or poll.note != row.message:
            return True
        now = self._context.now()
        if self._context.deadlines.overdue(known.job, known.attempt, now) is not None:
            return True
        return self._context.deadlines.is_stalled(known.job, now, heard_at=row.heard_at)

    async def _read(self, known: _Known, row: RunningRow) -> bool:
        """Read and store new lines. True if a stage handler has to: a backlog, or another file."""
        tail = row.tail or b""
        place, limit = row.offset - row.base - len(tail), len(tail) + _MOST_BYTES
        stream = known.target.read(known.handle, EVENTS_FILE, offset=place, limit=limit)
        got = await self._context.call("read", stream)
        if len(got) == limit or not got.startswith(tail):
            return True  # `ingest` tells a short read from another file
        got = got[len(tail) :]
        lines, inside = cut(
            got, offset=row.offset, zone=known.zone, inside=row.inside, last=False, line_limit=LINE_LIMIT
        )
        if len(lines) > self._context.lines.size.lines:
            return True  # more than one transaction
        if row.kept + sum(map(event_quota.weigh, lines)) > known.room:
            return True  # over the quota, or nearly
        checked = row.stage is Stage.CHECKING
        if not lines and not checked:
            self._not_before[row.attempt] = time.monotonic() + self._quiet_s
        if not lines:
            return False
        self._not_before.pop(row.attempt, None)
        end = lines[-1].offset + lines[-1].length
        tail = tail_of(tail, got[: end - row.offset])
        chunk = Chunk(job_id=row.job_id, attempt=row.attempt, lines=lines, inside=inside, tail=tail)
        stored = await self._context.lines.append(self._context.db, chunk)
        return checked and (not stored or may_pass_checks(lines))

    async def _read_later_nodes(self, known: _Known) -> bool:
        """Ingest new lines of the second and later nodes. True if a stage handler has to."""
        if not known.later_nodes:
            return False
        return not await ingest_nodes(self._context, known.job, known.attempt, known.handle, first=1)
