"""Streaming responses: poll, send new events or log bytes, until the job has ended.

Each open stream costs a task and a query per poll, so their number is limited. The stream of a revoked token ends
within `token_check_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

from starlette.concurrency import run_in_threadpool

from trainmaster.api.codec import to_json
from trainmaster.control.log_view import logs
from trainmaster.core.errors import StorageError, TargetError
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.storage import Store
from trainmaster.store import jobs, people, tokens
from trainmaster.store.attempts import list_attempts
from trainmaster.store.database import Database
from trainmaster.store.events import list_events
from trainmaster.store.page_rows import backlog
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.web.auth import Caller
from trainmaster.web.errors import Refused

END = "end"  # id and name of the last message of a job's events
_AWAY: tuple[type[Exception], ...] = (TargetError, StorageError, *backlog.GONE)
_LOOK_S = 0.5
_BATCH = 500  # events of one look
_CHUNK = 1 << 18  # bytes of a log in one piece
_MOST = 256  # open at once
_TOKEN_CHECK_S = 2.0  # a revoked token ends its streams within 5 s, also while they are busy


class Followers:
    """Open streams: their number and their intervals."""

    def __init__(
        self,
        *,
        look_s: float = _LOOK_S,
        alive_s: float = 15.0,
        token_check_s: float = _TOKEN_CHECK_S,
        most: int = _MOST,
    ) -> None:
        self.look_s, self.alive_s, self.token_check_s, self._most = look_s, alive_s, token_check_s, most
        self.open = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def refuse_when_full(self) -> None:
        if self.open >= self._most:
            raise Refused(503, "too_many_open", "too many open streams", headers={"Retry-After": "10"})


async def events(
    followers: Followers, db: Database, job_id: str, who: Caller, *, after: tuple[int, int] | None, node: int = 0
) -> AsyncIterator[str]:
    """A job's events as server-sent events, behind `after`, until the job is final. The `id` of each is its cursor."""
    stream = node_file(EVENTS_FILE, node)
    with followers.one_more():
        spoke = checked = time.monotonic()
        yield "retry: 2000\n\n"
        while True:
            if time.monotonic() - checked >= followers.token_check_s:
                if not await is_live(db, who):
                    return
                checked = time.monotonic()
            try:
                # The job first: events recorded before its end are then among those read after.
                job = await run_in_threadpool(jobs.find_job, db, job_id)
                rows = await run_in_threadpool(list_events, db, job_id, after=after, limit=_BATCH, stream=stream)
            except backlog.GONE:
                job, rows = None, []  # unavailable for a while: the stream waits and misses nothing
            for row in rows:
                after = row.cursor
                yield _message("event", row, "{}:{}".format(*after))
            if rows:
                spoke = time.monotonic()
                continue
            if job is not None and job.status.final:
                yield _message(END, {"status": job.status.value, "reason": job.reason and job.reason.value}, END)
                return
            if time.monotonic() - spoke >= followers.alive_s:
                yield ": alive\n\n"
                spoke = time.monotonic()
            await asyncio.sleep(followers.look_s)


async def log(
    followers: Followers, db: Database, storage: Store, job: JobRow, attempt: AttemptRow, *, who: Caller, stream: str,
    offset: int,
) -> AsyncIterator[bytes]:  # fmt: skip
    """The bytes of a log from an offset, until its attempt has ended."""
    with followers.one_more():
        checked = time.monotonic()
        over = logs.is_over(job, attempt)
        while True:
            if time.monotonic() - checked >= followers.token_check_s:
                if not await is_live(db, who):
                    return
                checked = time.monotonic()
            try:
                piece = await logs.read(db, storage, job, attempt, stream, offset=offset, limit=_CHUNK)
                if piece:
                    offset += len(piece)
                    yield piece
                    continue
                if over:
                    return
                new_job, new_attempt = await run_in_threadpool(read_again, db, job.id, attempt.number)
                if new_job is None or new_attempt is None:
                    return
                # Read once more after the end is known: bytes written in between are sent too.
                job, attempt, over = new_job, new_attempt, logs.is_over(new_job, new_attempt)
            except _AWAY:
                if over:
                    return
            if not over:
                await asyncio.sleep(followers.look_s)


async def is_live(db: Database, who: Caller) -> bool:
    """Whether the token or the session of a caller is still valid; also while the database is away."""
    try:
        if who.session is not None:
            return await run_in_threadpool(people.is_live, db, who.session.id, at=datetime.now(UTC))
        return who.token_id is None or await run_in_threadpool(tokens.is_live, db, who.token_id)
    except backlog.GONE:
        return True


def read_again(db: Database, job_id: str, number: int) -> tuple[JobRow | None, AttemptRow | None]:
    """The rows of a job and of one of its attempts, as they are now."""
    attempts = list_attempts(db, job_id)
    return jobs.find_job(db, job_id), next((row for row in attempts if row.number == number), None)


def _message(name: str, value: object, place: str) -> str:
    return f"id: {place}\nevent: {name}\ndata: {to_json(value)}\n\n"
