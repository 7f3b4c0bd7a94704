"""Logs of an attempt: read from its target while it runs, from storage afterwards."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trainmaster import targets
from trainmaster.api.files import LogStream
from trainmaster.core.errors import StorageError, TargetError, Unreachable
from trainmaster.core.plan import AGENT_LOG, EVENTS_FILE, EXIT_FILE
from trainmaster.storage import Store
from trainmaster.store import artifacts
from trainmaster.store.database import Database
from trainmaster.store.rows import ArtifactRow, AttemptRow, JobRow
from trainmaster.targets import Target

# The plan is not among them: it holds the environment as it was given, and people put secrets there all the same.
_NODE = r"(?:\.node-[1-9][0-9]{0,4})?"  # of the second and later nodes (core/plan.py)
_OWN = "|".join(name.replace(".", rf"{_NODE}\.") for name in (EVENTS_FILE, AGENT_LOG, EXIT_FILE))
STREAM = rf"(?:{_OWN}|rank-[0-9]{{1,6}}{_NODE}\.log)"
_TIMEOUT_S = 20.0  # a person waits
_READERS = ThreadPoolExecutor(8, thread_name_prefix="kept")


async def read(
    db: Database,
    storage: Store,
    job: JobRow,
    attempt: AttemptRow,
    stream: str,
    *,
    offset: int,
    limit: int,
    load: Callable[[str], Target] = targets.load,
) -> bytes:
    """At most `limit` bytes of a stream from `offset`; empty where there is no more."""
    if is_over(job, attempt):
        path = f"attempts/{attempt.number}/{stream}"
        kept = await asyncio.to_thread(artifacts.find_artifact, db, job.id, path)
        if kept is not None:
            try:
                return await read_stored(storage, kept, offset=offset, limit=limit)
            except StorageError:
                if attempt.handle is None:
                    raise
                # The target may still have it, the unreachable storage then does not matter.
                return await _at_target(job, attempt, stream, offset=offset, limit=limit, load=load)
    return await _at_target(job, attempt, stream, offset=offset, limit=limit, load=load)


async def read_stored(storage: Store, row: ArtifactRow, *, offset: int, limit: int) -> bytes:
    """`read_kept`, in threads of its own: a storage that hangs blocks only its own readers."""
    read = functools.partial(read_kept, storage, row, offset=offset, limit=limit)
    return await asyncio.get_running_loop().run_in_executor(_READERS, read)


async def list_streams(db: Database, job: JobRow, attempts: list[AttemptRow]) -> list[LogStream]:
    """Every stream of a job: what is kept, and what the newest attempt has written so far."""
    rows = await asyncio.to_thread(artifacts.list_artifacts, db, job.id)
    streams: dict[tuple[int, str], LogStream] = {}
    for row in rows:
        match = re.fullmatch(rf"attempts/(\d+)/({STREAM})", row.path)
        if match:
            number, stream = int(match[1]), match[2]
            streams[number, stream] = LogStream(attempt=number, stream=stream, size_bytes=row.size_bytes, stored=True)
    for attempt in attempts[-1:]:
        if attempt.handle is None or (is_over(job, attempt) and any(number == attempt.number for number, _ in streams)):
            continue
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                files = await targets.load(job.target).list_files(attempt.handle)
        except TimeoutError as error:
            raise Unreachable(f"the target did not list its files within {_TIMEOUT_S:g} s") from error
        for file in files:
            if re.fullmatch(STREAM, file.name):
                place = attempt.number, file.name
                streams[place] = LogStream(
                    attempt=attempt.number, stream=file.name, size_bytes=file.size_bytes, stored=False
                )
    return [streams[place] for place in sorted(streams)]


def is_over(job: JobRow, attempt: AttemptRow) -> bool:
    """Whether this attempt writes no more."""
    return job.status.final or attempt.released_at is not None or attempt.number < job.attempts


def read_kept(storage: Store, row: ArtifactRow, *, offset: int, limit: int) -> bytes:
    """A part of what is kept of a job, cut at its end."""
    size = min(limit, row.size_bytes - offset)
    return storage.read(f"jobs/{row.job_id}/{row.path}", start=offset, size=size) if size > 0 else b""


async def _at_target(
    job: JobRow, attempt: AttemptRow, stream: str, *, offset: int, limit: int, load: Callable[[str], Target]
) -> bytes:
    if attempt.handle is None:
        raise TargetError("the attempt was never placed; there is nothing to read")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await load(job.target).read(attempt.handle, stream, offset=offset, limit=limit)
    except TimeoutError as error:
        raise Unreachable(f"the target did not answer within {_TIMEOUT_S:g} s") from error
