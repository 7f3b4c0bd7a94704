"""Upload and download of files and trees over a session: parallel streams, checksums, progress, resume after a cut.

    await upload(session, Path("model.bin"), "~/data/model.bin")       a file; folders above it are made
    await upload(session, Path("src"), "~/src", progress=show)          a folder
    await download(session, "~/results", Path("results"))

A folder that does not exist yet at the destination appears whole, at once; into one that exists, files are moved when
all have arrived. Files are sent in units (tree.py) over several channels, each with
a window of its own, which on a long link bounds its rate.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import posixpath
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import DiskFull, NodeUnavailable, PathDenied, PathMissing, TargetError, Unreachable
from trainmaster.remote.transfer import DamagedUnit, FileUnit, Incoming, Manifest, Slice, Unit, read_unit, scan, sha256
from trainmaster.targets._answers import malformed
from trainmaster.targets.ssh.session import Reply, Request, Session

P = ParamSpec("P")
T = TypeVar("T")
Progress = Callable[[int, int], None]  # bytes that have arrived, bytes in all

_STREAMS, _STREAMS_FAR = 2, 6  # channels of a large transfer; a window bounds the rate of each on a long link
_FAR_S = 0.02  # round trip of a long link
_UNITS_PER_STREAM = 8  # 64 MiB
_AHEAD = 2  # units under way on the first channel
_TRIES = 6  # failures in a row without one unit that arrived
_UNIT_TRIES = 3  # of a unit that arrives damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Result of a transfer."""

    files: int
    size_bytes: int
    resumed_bytes: int  # of them, those that an earlier try had brought


async def upload(
    session: Session, source: Path, to: str, *, progress: Progress | None = None, durable: bool = False
) -> Receipt:
    """Copy a file or folder to a node; a transfer that was cut goes on where it stopped.

    `durable`: returns when the files are on the node's disk; what has its name then survives a loss of power.
    """
    single = await _here(source.is_file)
    folder, name = (posixpath.dirname(to), posixpath.basename(to)) if single else (to, None)
    manifest = await _here(scan, source, name=name)
    root = source.parent if name is not None else source
    at_source = {name: source.name} if name is not None else {}
    draft = manifest.draft(session.host.name)

    async def begin() -> Collection[int]:
        return _numbers(await session.request("files_begin", into=folder, draft=draft, body=manifest.pack()))

    async def move(request: Request, number: int, unit: Unit) -> None:
        at_root, data = _renamed(unit, at_source), b""  # type: tuple[Unit, bytes | FileUnit]
        if len(at_root) == 1:
            data = FileUnit(root, at_root[0])
            digest = await _here(data.sha256)
        else:
            data = await _here(read_unit, root, at_root)
            digest = await asyncio.to_thread(sha256, data)
        await request("files_put", into=folder, draft=draft, unit=number, sha256=digest, body=data)

    done = _Progress(manifest, progress)
    try:
        await _resume(session, manifest, begin, move, done)
    except Unreachable:
        raise  # what has arrived stays, and the next call goes on with it
    except TargetError:
        await _drop(session, folder, draft)
        raise
    await _patient(lambda: session.request("files_end", into=folder, draft=draft, durable=durable))
    return done.receipt()


async def upload_work(folder: Path, nodes: Sequence[Session], attempt: str) -> None:
    """Send the files of a folder to every node that has no working folder of this job yet. A rank sees all or none.

    A node that has one keeps it, with what the job changed there.
    """
    await asyncio.gather(*(_upload_work(folder, node, attempt) for node in nodes))


async def _upload_work(folder: Path, node: Session, attempt: str) -> None:
    result = (await node.request("has_work", attempt=attempt)).result
    if result.get("present") is True:
        return
    if not isinstance(place := result.get("folder"), str):
        raise malformed(f"{node.host.name}: no working folder")
    await upload(node, folder, place, durable=True)  # a node that has the folder is sent none again


async def download(session: Session, source: str, to: Path, *, progress: Progress | None = None) -> Receipt:
    """Copy a file or folder from a node; a transfer that was cut goes on where it stopped."""
    kind = (await session.request("exists", path=source)).result.get("kind")
    name = to.name if kind == "file" else None
    manifest, root = await _list(session, source, name)
    at_source = {name: posixpath.basename(source)} if name is not None else {}
    incoming = Incoming(to.parent if name is not None else to, manifest.digest)

    async def begin() -> Collection[int]:
        return await _here(incoming.begin, manifest)

    async def move(request: Request, number: int, unit: Unit) -> None:
        slices = [(piece.path, piece.start, piece.length) for piece in _renamed(unit, at_source)]
        reply = await request("files_get", root=root, slices=slices)
        await _here(incoming.write, number, str(reply.result.get("sha256")), reply.body)

    done = _Progress(manifest, progress)
    try:
        await _resume(session, manifest, begin, move, done)
        if (await _list(session, source, name))[0] != manifest:
            raise TargetError(f"{session.host.name}: {source} changed while it was copied; copy it again")
    except Unreachable:
        raise
    except TargetError:
        await asyncio.to_thread(incoming.drop)
        raise
    await _here(incoming.finish)
    return done.receipt()


async def _here(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work with the files of this machine, in a thread; OSErrors become those that a node answers with."""
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except PermissionError as error:
        raise PathDenied(str(error)) from None
    except FileNotFoundError as error:
        raise PathMissing(str(error)) from None
    except OSError as error:
        raise (DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else TargetError)(str(error)) from None


async def _list(session: Session, source: str, name: str | None) -> tuple[Manifest, str]:
    reply = await session.request("files_list", path=source, name=name)
    root = reply.result.get("root")
    if not isinstance(root, str):
        raise malformed(f"{session.host.name}: a list of files without a folder")
    return Manifest.unpack(reply.body), root


def _renamed(unit: Unit, names: dict[str, str]) -> Unit:
    """A unit with the names at the source: a single file may get another one."""
    if not names:
        return unit
    return tuple(Slice(path=names[piece.path], start=piece.start, length=piece.length) for piece in unit)


class _Progress:
    """Bytes that have arrived."""

    def __init__(self, manifest: Manifest, show: Progress | None) -> None:
        self._manifest, self._show = manifest, show
        self._sizes = [sum(piece.length for piece in unit) for unit in manifest.units]
        self._first: int | None = None
        self.units: set[int] = set()

    def begin(self, done: Collection[int]) -> None:
        self.units = set(done)
        if self._first is None:
            self._first = self._bytes()
        self._tell()

    def add(self, number: int) -> None:
        self.units.add(number)
        self._tell()

    def receipt(self) -> Receipt:
        files = sum(1 for entry in self._manifest.entries if entry.kind == "file")
        return Receipt(files=files, size_bytes=self._manifest.size_bytes, resumed_bytes=self._first or 0)

    def _bytes(self) -> int:
        return sum(self._sizes[number] for number in self.units)

    def _tell(self) -> None:
        if self._show is not None:
            self._show(self._bytes(), self._manifest.size_bytes)


async def _resume(
    session: Session,
    manifest: Manifest,
    begin: Callable[[], Awaitable[Collection[int]]],
    move: Callable[[Request, int, Unit], Awaitable[None]],
    done: _Progress,
) -> None:
    """Move every unit. A connection that breaks is opened again while units arrive between two failures."""
    failures, arrived = 0, 0
    while True:
        try:
            done.begin(await begin())
            await _move_all(session, manifest, move, done)
            return
        except Unreachable:
            failures = 1 if len(done.units) > arrived else failures + 1
            arrived = len(done.units)
            if failures >= _TRIES:
                raise
            await asyncio.sleep(backoff_s(failures, first_s=0.5, longest_s=10.0))


async def _patient(request: Callable[[], Awaitable[Reply]]) -> Reply:
    """Repeat a request that may be repeated while the connection is opened again."""
    for failures in range(1, _TRIES):
        try:
            return await request()
        except Unreachable:
            await asyncio.sleep(backoff_s(failures, first_s=0.5, longest_s=10.0))
    return await request()


async def _move_all(
    session: Session, manifest: Manifest, move: Callable[[Request, int, Unit], Awaitable[None]], done: _Progress
) -> None:
    waiting = collections.deque(number for number in range(len(manifest.units)) if number not in done.units)

    async def work(request: Request) -> None:
        while waiting:
            number = waiting.popleft()
            for left in reversed(range(_UNIT_TRIES)):
                try:
                    await move(request, number, manifest.units[number])
                    break
                except DamagedUnit:
                    if left == 0:
                        raise
            done.add(number)

    async def work_apart() -> None:
        """Work on a channel of its own; a server may allow few of them."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                request = await stack.enter_async_context(session.channel())
            except NodeUnavailable:
                return
            await work(request)

    if further := min(await _streams(session), len(waiting) // _UNITS_PER_STREAM):
        await _together([work_apart() for _ in range(further)])
    await _together(
        [work(session.request) for _ in range(_AHEAD)]
    )  # small transfers, and where no channel could be had


async def _streams(session: Session) -> int:
    began = time.monotonic()
    await session.request("exists", path="/")
    return _STREAMS if time.monotonic() - began < _FAR_S else _STREAMS_FAR


async def _together(work: Collection[Awaitable[None]]) -> None:
    """Run all; at the first error the others are cancelled and that error is raised, alone."""
    tasks = [asyncio.ensure_future(step) for step in work]
    try:
        for task in asyncio.as_completed(tasks):
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drop(session: Session, folder: str, draft: str) -> None:
    try:
        await session.request("files_drop", into=folder, draft=draft)
    except TargetError:
        return  # removed by a later transfer


def _numbers(reply: Reply) -> Collection[int]:
    done = reply.result.get("done")
    if not isinstance(done, list) or not all(isinstance(number, int) for number in done):
        raise malformed("no list of units")
    return done
