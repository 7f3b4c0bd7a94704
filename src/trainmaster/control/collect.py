"""Keep in storage what belongs to a job: the project file before it starts, what it left when it is over.

Each object is copied in pieces, read back, compared, and only then noted as an artifact. A file that has its row is
not copied again, so a copy that was cut off anywhere is simply made again, and only what is missing is.

    jobs/<job>/project.yaml                  what was asked for (project_yaml.py)
    jobs/<job>/inputs/config.json            the config of our trainer
    jobs/<job>/attempts/<n>/events.jsonl     and agent.log, rank-N.log, exit.json
    jobs/<job>/outputs/…                     what the workload left in its outputs folder; of several attempts the last
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from trainmaster.control import failpoints, project_yaml, quotas
from trainmaster.control.context import Context
from trainmaster.control.project_yaml import PROJECT_FILE, prefix
from trainmaster.core.errors import JobUnreadable, TargetError, Unreachable, UsageError
from trainmaster.core.plan import EVENTS_FILE, OUTPUTS_FOLDER, split_node_file
from trainmaster.storage import Store, transfer
from trainmaster.store import artifacts, attempts, jobs
from trainmaster.store.rows import ArtifactRow, AttemptRow, JobRow
from trainmaster.store.stand_ins import find_stand_in
from trainmaster.targets import FileSize, Handle, ReadsMany

_PART_BYTES = 200  # of one part of a path; file systems hold 255
_PATH_BYTES = 900  # of a path; object stores hold 1,024 with the prefix
_SHOWN = 5  # files named in a message
_NAME_CHARACTERS = 200
_CHUNK = 4 << 20  # bytes of a file in one read
_AHEAD = 3  # reads under way; bytes held are three times _CHUNK
_SMALL_BYTES, _BATCH_FILES = 64 << 10, 500  # at most 32 MiB in one request
_ASK_S = 1.0  # between two looks whether the job was cancelled
_PARTING_S = 5.0  # over what a read may take: an event loop that has ended does not answer
# Threads of its own: a copy waits for reads, which need a thread too. In one pool, enough copies would wait for ever.
_COPIERS = ThreadPoolExecutor(4, thread_name_prefix="storage")

T = TypeVar("T")


class _CutOff(Exception):
    """We are to stop in the middle of a copy."""


async def store_project(context: Context, job: JobRow) -> None:
    """Build the project file of a job and store it with what it names, once."""
    rows = await context.read(artifacts.list_artifacts, job.id)
    if any(row.path == PROJECT_FILE for row in rows):
        return
    # The file itself last: what it names is then there.
    for path, text in project_yaml.build(job, context.storage.url).items():
        content = text.encode()
        sha256 = await _in_thread(context.storage, f"{prefix(job.id)}/{path}", content)
        await _insert_row(context, job, None, kind="project", path=path, size_bytes=len(content), sha256=sha256)


async def store_files(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> list[str]:
    """Store every file of an attempt that is not stored yet as it is now; what cannot be stored, with the reason."""
    unstored: list[str] = []
    files = await context.call("list", context.load(job.target).list_files(handle))
    rows = {row.path: row for row in await asyncio.to_thread(artifacts.list_artifacts, context.db, job.id)}
    files = [file for file in files if not _is_stored(rows.get(_path(attempt, file.name)), attempt, file)]
    small, patience = _SmallFiles(context, job, handle, files), _Patience(context, job, attempt)
    quota = quotas.open_quota(context.storage, sum(row.size_bytes for row in rows.values()))
    for file in files:
        path = _path(attempt, file.name)
        try:
            if file.fault:
                raise TargetError(file.fault)
            if is_output := _kind(file.name) == "output":
                await patience.check()
            quota.take(file.size_bytes)
            place = f"{prefix(job.id)}/{path}"
            if (content := await small.take(file)) is not None:
                size_bytes, sha256 = len(content), await _in_thread(context.storage, place, content)
            elif is_output:
                size_bytes, sha256 = await patience.bound(_copy(context, job, handle, file, place=place, quota=quota))
            else:
                size_bytes, sha256 = await _copy(context, job, handle, file, place=place, quota=quota)
        except Unreachable:
            raise
        except (TargetError, UsageError) as refused:  # this file, for ever: the others must not wait for it
            unstored.append(f"{path}: {refused}")
            continue
        await _insert_row(
            context, job, attempt.id, kind=_kind(file.name), path=path, size_bytes=size_bytes, sha256=sha256
        )
    return unstored


def describe_unstored(unstored: Sequence[str]) -> str:
    """A sentence for the job's message; empty if everything was stored."""
    if not unstored:
        return ""
    shown = "; ".join(text[:_NAME_CHARACTERS] for text in unstored[:_SHOWN])
    more = f" and {len(unstored) - _SHOWN} more" if len(unstored) > _SHOWN else ""
    return f"{len(unstored)} {'file was' if len(unstored) == 1 else 'files were'} not stored: {shown}{more}"


def _is_stored(row: ArtifactRow | None, attempt: AttemptRow, file: FileSize) -> bool:
    if file.fault or row is None or row.attempt != attempt.id or row.size_bytes != file.size_bytes:
        return False
    # An attempt without an exit record may have gone on writing until it was released.
    return attempt.exit is not None or attempt.released_at is None or row.stored_at >= attempt.released_at


def _path(attempt: AttemptRow, name: str) -> str:
    return escape(name) if name.partition("/")[0] == OUTPUTS_FOLDER else f"attempts/{attempt.number}/{name}"


def escape(name: str) -> str:
    """A path that every storage and both databases take: unsafe bytes as %XX, long parts shortened by a digest.

    Two names give two paths: a percent sign that could be read as an escape is escaped itself.
    """
    path = "/".join(_shorten(_ESCAPED.sub(_percent, part), _PART_BYTES) for part in name.split("/"))
    if len(path.encode()) <= _PATH_BYTES:
        return path
    folder, last = path.partition("/")[0], path.rpartition("/")[2]
    return f"{folder}/{_digest(name)}~{_shorten(last, 120)}"


# Controls, backslash, DEL, surrogate escapes of bytes that are not UTF-8, and what looks like an escape of ours.
_ESCAPED = re.compile("[\x00-\x1f\\\\\x7f\ud800-\udfff]|%(?=[0-9A-F]{2})")


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", errors="surrogateescape"))


def _shorten(part: str, limit: int) -> str:
    raw = part.encode()
    if len(raw) <= limit:
        return part
    stem, dot, ending = part.rpartition(".")
    ending = f".{ending}" if dot and stem and len(ending) <= 16 else ""
    room = limit - 17 - len(ending.encode())
    return f"{raw[:room].decode(errors='ignore')}~{_digest(part)[:16]}{ending}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).hexdigest()[:32]


def _kind(name: str) -> str:
    if name.startswith(f"{OUTPUTS_FOLDER}/"):
        return "output"
    if split_node_file(name)[1] == EVENTS_FILE:
        return "events"
    return "log" if name.endswith(".log") else "report"


async def _insert_row(
    context: Context, job: JobRow, attempt: str | None, *, kind: str, path: str, size_bytes: int, sha256: str
) -> None:
    at = context.now()
    await context.apply(
        job.id,
        lambda conn: artifacts.insert_artifact(
            conn, job_id=job.id, attempt=attempt, kind=kind, path=path, size_bytes=size_bytes, sha256=sha256, at=at
        ),
        what=f"artifact {path}",
    )


class _SmallFiles:
    """Contents of small files, read in batches where the target can."""

    def __init__(self, context: Context, job: JobRow, handle: Handle, files: Sequence[FileSize]) -> None:
        self._context, self._target, self._handle = context, context.load(job.target), handle
        self._waiting = [file for file in files if not file.fault and file.size_bytes <= _SMALL_BYTES]
        self._read: dict[str, bytes] = {}

    async def take(self, file: FileSize) -> bytes | None:
        """The content of a file; None where it has to be read by itself."""
        if not isinstance(self._target, ReadsMany):
            return None
        if self._waiting and self._waiting[0].name == file.name:
            await self._read_batch(self._target)
        content = self._read.pop(file.name, None)
        return content if content is not None and len(content) == file.size_bytes else None

    async def _read_batch(self, target: ReadsMany) -> None:
        batch, self._waiting = self._waiting[:_BATCH_FILES], self._waiting[_BATCH_FILES:]
        names = [file.name for file in batch]
        asked = target.read_many(self._handle, names, limit=_SMALL_BYTES)
        for name, content in zip(names, await self._context.call("read", asked), strict=True):
            if content is not None:
                self._read[name] = content


class _Patience:
    """Ends copies of outputs when the time of a job that was cancelled, or is at its cap, is over.

    One of terabytes would hold it for hours.
    """

    def __init__(self, context: Context, job: JobRow, attempt: AttemptRow) -> None:
        self._context, self._job, self._attempt = context, job, attempt
        self._asked = float("-inf")
        self._over = False

    async def bound(self, copy: Coroutine[Any, Any, T]) -> T:
        """What a copy returns; TargetError where it has to end before."""
        task = asyncio.ensure_future(copy)
        try:
            while True:
                await self.check()
                done, _ = await asyncio.wait({task}, timeout=_ASK_S)
                if done:
                    return task.result()
        finally:
            task.cancel()  # of one that is done: nothing
            await asyncio.wait({task})

    async def check(self) -> None:
        """TargetError where the time is over. Asks the database once a second."""
        if not self._over and time.monotonic() - self._asked >= _ASK_S:
            self._asked = time.monotonic()
            job, attempt = await asyncio.to_thread(self._read)
            now = self._context.now()
            self._over = job is not None and self._context.deadlines.must_stop_storing(job, attempt, now)
        if self._over:
            raise TargetError("the job was cancelled, or reached a cap on its cost, before it was stored")

    def _read(self) -> tuple[JobRow | None, AttemptRow]:
        try:
            job = jobs.find_job(self._context.db, self._job.id)
        except JobUnreadable:
            found = find_stand_in(self._context.db, self._job.id)
            job = found[0] if found is not None else None
        rows = attempts.list_attempts(self._context.db, self._job.id)
        return job, next((row for row in rows if row.id == self._attempt.id), self._attempt)


async def _copy(
    context: Context, job: JobRow, handle: Handle, file: FileSize, *, place: str, quota: quotas.Quota
) -> tuple[int, str]:
    """One file from its target into storage: as many bytes as it had when it was listed, should it still grow."""
    loop, target = asyncio.get_running_loop(), context.load(job.target)
    cut_off = threading.Event()
    copied = 0

    def pieces() -> Iterator[bytes]:
        nonlocal copied
        ahead: deque[tuple[int, Future[bytes]]] = deque()  # several reads are under way: a long link is kept full
        asked = 0
        try:
            while copied < file.size_bytes:
                if cut_off.is_set():
                    raise _CutOff
                while asked < file.size_bytes and len(ahead) < _AHEAD:
                    limit = min(_CHUNK, file.size_bytes - asked)
                    read = context.call("read", target.read(handle, file.name, offset=asked, limit=limit))
                    ahead.append((limit, asyncio.run_coroutine_threadsafe(read, loop)))
                    asked += limit
                limit, answer = ahead.popleft()
                piece = answer.result(context.timeouts_s["read"] + _PARTING_S)
                copied += len(piece)
                if len(piece) < limit:  # fewer than were asked for: those behind it are asked for again
                    for _, later in ahead:
                        later.cancel()
                    ahead.clear()
                    asked = copied
                if not piece:
                    return  # it is shorter by now
                quota.require_room()
                yield piece
        finally:
            for _, later in ahead:
                later.cancel()

    try:
        sha256 = await _in_thread(context.storage, place, pieces())
    except asyncio.CancelledError:
        cut_off.set()  # or the thread would go on copying after us
        raise
    return copied, sha256


async def _in_thread(store: Store, place: str, data: bytes | Iterator[bytes]) -> str:
    return await asyncio.get_running_loop().run_in_executor(_COPIERS, _put, store, place, data)


def _put(store: Store, place: str, data: bytes | Iterator[bytes]) -> str:
    """Put an object, read it back and compare; its SHA-256. A thread's work: storage is not async."""
    failpoints.before("put", place)
    receipt = transfer.upload(store, place, data)
    failpoints.after("put", place)
    return receipt.sha256
