"""Context of a stage handler, with its two ways to act: `call` a target, `apply` a change to the rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from trainmaster.control import failpoints
from trainmaster.control.commits import Commits, GroupCommit, Reads
from trainmaster.control.deadlines import Deadlines
from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import Unreachable
from trainmaster.core.states import Reason
from trainmaster.queueing.state import Assigned, Kind, Rules
from trainmaster.storage import Store
from trainmaster.store import leases
from trainmaster.store.capacity.order import Checks
from trainmaster.store.database import Connection, Database, describe_error, is_unavailable
from trainmaster.store.rows import JobRow
from trainmaster.targets import Placement, Submission, Target

T = TypeVar("T")
P = ParamSpec("P")
_LONGEST_REST_S = 900.0

# Longest wait for one call of a target, in seconds; then we could not ask, and ask again later.
TIMEOUTS_S = {
    "place": 60.0,
    "submit": 300.0,
    "poll": 30.0,
    "read": 60.0,
    "list": 60.0,
    "cancel": 30.0,
    "release": 120.0,
    "launch": 120.0,
    "connect": 60.0,
    "stop": 60.0,
}
# Those that change something out there; to ask twice is nothing, so a drill need not strike around asking.
_EFFECTS = frozenset({"submit", "cancel", "release", "launch"})


class LeaseLost(Exception):
    """Another reconciler holds this job by now; nothing was written."""


def backoff_after(reason: Reason, attempt: int) -> float:
    """Seconds between an attempt that ended so and the next one: longer each time, and never the same for two jobs."""
    return backoff_s(attempt, first_s=reason.rule.rest_s, longest_s=_LONGEST_REST_S)


def log_failure(log: logging.Logger, what: str, error: Exception) -> None:
    """Log what ended one round of a loop: in one line where the database is away, which may last for hours of rounds;
    anything else may be our own mistake and shows its trace."""
    if is_unavailable(error):
        log.warning("%s: %s", what, describe_error(error))
    else:
        log.error("%s", what, exc_info=error)


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The rows, the folder, the targets, the storage, the clock, and how long to wait for each."""

    db: Database
    home: Path
    load: Callable[[str], Target]
    token: str  # whose leases we write under
    storage: Store
    timeouts_s: Mapping[str, float] = field(default_factory=lambda: TIMEOUTS_S)
    rest_s: Callable[[Reason, int], float] = backoff_after
    deadlines: Deadlines = field(default_factory=Deadlines)
    now: Callable[[], datetime] = _utc_now
    unsent: set[str] = field(default_factory=set)  # attempts placed here and not submitted by anybody yet
    # Kinds of devices that our own queue gives out at each place that was asked, and what it gave to queued jobs
    # (dispatch.py). None: there is no queue, and every job starts at once.
    kinds: dict[str, frozenset[Kind]] | None = None
    drained: set[str] = field(default_factory=set)  # places of that queue where nothing starts
    checks: Callable[[], Checks] = dict  # what the operator's own checks said last, by machine
    bookings: dict[str, tuple[int, Assigned]] = field(default_factory=dict)  # job → number of the attempt, devices
    rules: Rules = field(default_factory=Rules)  # of that queue
    commits: Commits = field(default_factory=Commits)
    reads: Reads = field(default_factory=Reads)
    lines: GroupCommit = field(default_factory=GroupCommit)

    async def call(self, name: str, answer: Awaitable[T]) -> T:
        """Ask or tell a target, for so long as it may take."""
        limit = self.timeouts_s[name]
        if name in _EFFECTS:
            failpoints.before(f"call {name}")
        try:
            async with asyncio.timeout(limit):
                result = await answer
        except TimeoutError as error:
            raise Unreachable(f"the target did not answer `{name}` within {limit:g} s") from error
        if name in _EFFECTS:
            failpoints.after(f"call {name}")
        return result

    async def read(self, query: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask the rows; a short query, which shares a thread with those of other jobs."""
        return await self.reads.read(self.db, lambda: query(self.db, *args, **kwargs))

    async def apply(self, job_id: str, change: Callable[[Connection], T], *, what: str) -> T:
        """Write for a job, in one transaction that holds only if the job is still ours. `what` names it for drills."""

        def change_if_held(conn: Connection) -> T:
            if not leases.holds(conn, job_id, self.token):
                raise LeaseLost(job_id)
            return change(conn)

        return await self.commits.write(self.db, change_if_held, what=what)

    def plan(self, job: JobRow, number: int) -> Submission:
        folder = self.home / "jobs" / job.id
        return self.load(job.target).plan(Placement(attempt=f"{job.id}.{number}", spec=job.spec, job_folder=folder))
