"""Listening to jobs that run, at a price that a thousand of them can pay.

Most looks at most jobs find nothing, or a line. For those a whole step (rows read, threads asked, a commit of its own)
is a hundred times what is needed. A glance asks the target how the attempt stands and what it wrote; new lines of many
jobs are kept in one transaction. Whatever else it sees (another report, a message, a deadline, silence, a backlog, an
error) it leaves to a step: `steps.py` alone decides what becomes of a job.

Nothing is remembered that rows do not say: of an attempt that runs, its spec and its handle do not change any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from trainmaster.control import failpoints
from trainmaster.control.context import Context
from trainmaster.control.deadlines import is_stalled
from trainmaster.control.ingest import LINE_LIMIT, cut
from trainmaster.control.transitions import last_attempt
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.states import Stage
from trainmaster.store import Database, events, jobs
from trainmaster.store.events import Chunk
from trainmaster.store.leases import RunningRow
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import Handle, Target

_MOST_BYTES = 64 << 10  # of one glance; more is a backlog, and a step's work
_GATHER_S = 0.05  # lines wait so long for those of other jobs, and share their commit
_QUIET_TICKS = 2  # a job that said nothing is asked at every second tick

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What does not change while an attempt runs."""

    job: JobRow
    attempt: AttemptRow
    handle: Handle
    target: Target
    zone: ZoneInfo


class Tail:
    """The glances of one reconciler."""

    def __init__(self, context: Context, *, tick_s: float) -> None:
        self._context = context
        self._quiet_s = (_QUIET_TICKS - 0.5) * tick_s
        self._known: dict[str, _Known] = {}  # by attempt
        self._not_before: dict[str, float] = {}  # by attempt
        self._group_commit = GroupCommit(context.db)

    def choose(self, rows: Collection[RunningRow]) -> list[RunningRow]:
        """Those of the running jobs that are to be looked at now. What is not among them is forgotten."""
        now, attempts = time.monotonic(), {row.attempt for row in rows}
        self._known = {attempt: known for attempt, known in self._known.items() if attempt in attempts}
        self._not_before = {attempt: when for attempt, when in self._not_before.items() if attempt in attempts}
        return [row for row in rows if self._not_before.get(row.attempt, 0.0) <= now]

    async def close(self) -> None:
        """Wait for the commit that is under way."""
        await self._group_commit.close()

    async def look(self, row: RunningRow) -> bool:
        """Take in what a job wrote. True if it needs a step."""
        try:
            known = self._known.get(row.attempt) or await self._learn(row)
            if known is None or await self._needs_handler(known, row):
                return True
            return await self._listen(known, row)
        except Exception as wrong:
            log.debug("job %s: %s", row.job_id, wrong)
            return True  # the step meets it too, and knows what to do

    async def _learn(self, row: RunningRow) -> _Known | None:
        job = await asyncio.to_thread(jobs.find_job, self._context.db, row.job_id)
        if job is None or job.stage is not Stage.RUNNING:
            return None
        attempt = await last_attempt(self._context, job)
        if attempt.id != row.attempt or attempt.handle is None:
            return None
        target, zone = self._context.load(job.target), ZoneInfo(job.spec.zone)
        known = _Known(job=job, attempt=attempt, handle=attempt.handle, target=target, zone=zone)
        self._known[row.attempt] = known
        return known

    async def _needs_handler(self, known: _Known, row: RunningRow) -> bool:
        poll = await self._context.call("poll", known.target.poll(known.handle))
        if poll.state is not row.report or poll.note != row.message:
            return True
        now = self._context.now()
        if self._context.deadlines.overdue(known.job, known.attempt, now) is not None:
            return True
        return is_stalled(known.job, now, heard_at=row.heard_at)

    async def _listen(self, known: _Known, row: RunningRow) -> bool:
        read = known.target.read(known.handle, EVENTS_FILE, offset=row.offset, limit=_MOST_BYTES)
        got = await self._context.call("read", read)
        if len(got) == _MOST_BYTES:
            return True
        lines, inside = cut(
            got, offset=row.offset, zone=known.zone, inside=row.inside, last=False, line_limit=LINE_LIMIT
        )
        if lines:
            self._not_before.pop(row.attempt, None)
            await self._group_commit.keep(Chunk(job_id=row.job_id, attempt=row.attempt, lines=lines, inside=inside))
        else:
            self._not_before[row.attempt] = time.monotonic() + self._quiet_s
        return False


class GroupCommit:
    """Commits lines of many jobs together: each waits a moment, and then one commit is there for all of them."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._waiting: list[tuple[Chunk, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    async def keep(self, chunk: Chunk) -> bool:
        """Returns once it is committed: False if another reader was first. Raises what went wrong with this one."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((chunk, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name="keep lines")
        return await future

    async def close(self) -> None:
        if self._task is not None:
            await self._task

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(_GATHER_S)
            batch, self._waiting = self._waiting, []
            try:
                kept = await asyncio.to_thread(_keep, self._db, [chunk for chunk, _ in batch])
            except Exception as wrong:
                # Nothing of it is there. One of them may be why: each for itself then, as a step.
                for _, future in batch:
                    if not future.done():
                        future.set_exception(wrong)
                continue
            for (_, future), one in zip(batch, kept, strict=True):
                if not future.done():
                    future.set_result(one)


def _keep(db: Database, chunks: list[Chunk]) -> list[bool]:
    for chunk in chunks:
        failpoints.before("commit lines", chunk.lines[0].offset)
    with db.write() as conn:
        kept = events.append_chunks(conn, chunks)
    for chunk in chunks:
        failpoints.after("commit lines", chunk.lines[0].offset)
    return kept
