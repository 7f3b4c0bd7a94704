"""Sessions with hosts: one SSH connection per host, kept open and shared by all jobs, with many requests at once.

A session connects at its first request. A connection that breaks fails the requests under way as `NodeUnavailable`,
and the next request connects again; after a refusal the host is left alone for a while, longer each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import DiskFull, NodeUnavailable, PathDenied, PathMissing, TargetError
from trainmaster.remote import frames
from trainmaster.remote.package import Package, pack
from trainmaster.remote.transfer import Changed, DamagedUnit, FileUnit
from trainmaster.targets._answers import clean, malformed
from trainmaster.targets.ssh import data_pipe
from trainmaster.targets.ssh.channel import Stream, command, ended, tail
from trainmaster.targets.ssh.connect import CONNECT_TIMEOUT_S, connect, explain
from trainmaster.targets.ssh.hosts import SshHost

_BEGIN_S = 60.0  # to receive the package and start Python, from a cold file system
_END_S = 2.0
_REST_S, _LONGEST_REST_S = 1.0, 60.0
_IDLE_S = 600.0  # without a request: the host, its entry or known_hosts was replaced, or nothing runs there
# Threads of their own: one that waits for a slow link must not keep others from reading a file.
_DATA_THREADS = ThreadPoolExecutor(32, thread_name_prefix="ssh-data")
T = TypeVar("T")


class Refusal(TargetError):
    """The node was asked and refused."""


# Kinds of refusals as the node's server names them (node_server.py).
_REFUSALS: Mapping[str, type[TargetError]] = {
    "denied": PathDenied,
    "missing": PathMissing,
    "full": DiskFull,
    "changed": Changed,
    "damaged": DamagedUnit,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer of a node: untrusted."""

    result: Mapping[str, Any]
    body: bytes

    def flag(self, name: str) -> bool:
        return self.result.get(name) is True

    def number(self, name: str) -> int:
        value = self.result.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0


class Request(Protocol):
    """Send a request and wait for its answer."""

    def __call__(self, method: str, *, body: bytes | FileUnit = b"", **params: Any) -> Awaitable[Reply]: ...


_Send = Callable[[str, Mapping[str, Any], bytes | FileUnit], Awaitable[tuple[dict[str, Any], bytes]]]


class Session:
    """The connection to one host and the requests on it."""

    def __init__(self, host: SshHost, known_hosts: bytes) -> None:
        self.host, self._known_hosts = host, known_hosts
        self._gate = asyncio.Lock()
        self._link: _Link | None = None
        self._failures, self._rest_until = 0, 0.0
        self._silent_since: float | None = None
        self._why: NodeUnavailable | None = None
        self._asking, self._asked_at = 0, time.monotonic()

    async def request(self, method: str, *, body: bytes | FileUnit = b"", **params: Any) -> Reply:
        """Send a request and wait for its answer. NodeUnavailable where none can come, Refusal where it is an error."""
        return await self._request(self._send, method, params, body)

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[Request]:
        """A channel of its own for bulk data: other requests do not wait behind it.

        Over the machine's own `ssh` where it can be, else a further channel of the connection.
        """
        first = await self._open()  # the node has the package then
        if data_pipe.is_possible(self.host):
            pipe = None
            with contextlib.suppress(NodeUnavailable):
                pipe = await _in_thread(data_pipe.DataPipe.open, self.host, self._known_hosts, _package())
            if pipe is not None:
                try:
                    yield self._bound(functools.partial(_in_thread, pipe.request))
                finally:
                    pipe.close()
                return
        link = await first.another()
        try:
            yield self._bound(link.request)
        finally:
            await link.close()

    def _bound(self, send: _Send) -> Request:
        async def request(method: str, *, body: bytes | FileUnit = b"", **params: Any) -> Reply:
            return await self._request(send, method, params, body)

        return request

    async def _send(
        self, method: str, params: Mapping[str, Any], body: bytes | FileUnit
    ) -> tuple[dict[str, Any], bytes]:
        return await (await self._open()).request(method, params, body)

    async def _request(self, send: _Send, method: str, params: Mapping[str, Any], body: bytes | FileUnit) -> Reply:
        self._asking += 1
        try:
            head, data = await send(method, params, body)
        except NodeUnavailable:
            self._silent_since = self._silent_since or time.monotonic()
            raise
        finally:
            self._asking -= 1
            self._asked_at = time.monotonic()
        self._silent_since = None
        if "error" in head:
            text = clean(str(head["error"]))[:2000]
            if head.get("kind") == "unreachable":
                raise NodeUnavailable(f"{self.host.name}: {text}", action="free what it lacks there, then wait")
            raise _REFUSALS.get(str(head.get("kind")), Refusal)(f"{self.host.name}: {text}")
        result = head.get("result")
        if not isinstance(result, dict):
            raise malformed(f"{self.host.name}: an answer to {method} without a result")
        return Reply(result=result, body=data)

    @property
    def lost(self) -> bool:
        """Whether the host has not answered for so long that its jobs are given up."""
        return self._silent_since is not None and time.monotonic() - self._silent_since > self.host.lost_after_s

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()

    async def _open(self) -> _Link:
        async with self._gate:
            if self._link is not None and self._link.alive:
                return self._link
            if self._why is not None and time.monotonic() < self._rest_until:
                raise self._why
            try:
                self._link = await _Link.open(self.host, self._known_hosts)
            except NodeUnavailable as error:
                self._failures += 1
                rest_s = backoff_s(self._failures, first_s=_REST_S, longest_s=_LONGEST_REST_S)
                self._rest_until = time.monotonic() + rest_s
                self._why = type(error)(f"{self.host.name}: {error.reason}", action=error.action)
                raise self._why from None
            self._failures, self._why = 0, None
            asyncio.get_running_loop().call_later(_IDLE_S, self._close_idle, self._link)
            return self._link

    def _close_idle(self, link: _Link) -> None:
        """Close a connection that nobody uses; the next request opens another."""
        if link is not self._link or not link.alive:
            return
        left_s = self._asked_at + _IDLE_S - time.monotonic()
        if self._asking or left_s > 0:
            asyncio.get_running_loop().call_later(max(left_s, _IDLE_S / 2), self._close_idle, link)
            return
        self._link = None
        _forget(self)
        link.end()


class _Link:
    """One open channel to the node's server."""

    def __init__(
        self, stack: contextlib.AsyncExitStack, connection: Any, process: Any, stream: Stream, host: SshHost
    ) -> None:
        self._stack, self._connection, self._process, self._stream = stack, connection, process, stream
        self._host = host
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._number = 0
        self._writing = asyncio.Lock()  # parts of two frames must not mix
        self._sending: set[asyncio.Task[None]] = set()
        self._said, self._closing = "", False
        self.alive = True
        self._task = asyncio.create_task(self._receive(), name=f"ssh {host.name}")

    @classmethod
    async def open(cls, host: SshHost, known_hosts: bytes) -> _Link:
        async with contextlib.AsyncExitStack() as stack:
            connection = await stack.enter_async_context(connect(host, known_hosts, timeout_s=CONNECT_TIMEOUT_S))
            return await cls._start(stack, connection, host, known_hosts)

    async def another(self) -> _Link:
        """A further channel on the same connection, with a server of its own at the node's end."""
        async with contextlib.AsyncExitStack() as stack:
            return await self._start(stack, self._connection, self._host, b"", verified=True)

    @classmethod
    async def _start(
        cls,
        stack: contextlib.AsyncExitStack,
        connection: Any,
        host: SshHost,
        known_hosts: bytes,
        *,
        verified: bool = False,
    ) -> _Link:
        package, nonce = _package(), secrets.token_hex(16)
        order = {
            "digest": package.digest, "size": len(package.data), "nonce": nonce, "deadline_s": _BEGIN_S,
            "serve": [host.folder, host.name], "verified": verified,
        }  # fmt: skip
        try:
            async with asyncio.timeout(_BEGIN_S):
                process = await connection.create_process(command(host.python, order), encoding=None)
                stack.callback(process.close)
                stream = Stream(process, nonce.encode())
                await cls._begin(process, stream, package)
        except TimeoutError:
            raise NodeUnavailable(
                f"it accepted the login, then its Python did not start in {_BEGIN_S:g} s",
                action="log in and check what its Python or file system waits for; reboot it if it stays",
            ) from None
        except NodeUnavailable:
            raise
        except Exception as error:
            raise explain(error, host, known_hosts, timeout_s=_BEGIN_S) from None
        return cls(stack.pop_all(), connection, process, stream, host)

    @staticmethod
    async def _begin(process: Any, stream: Stream, package: Package) -> None:
        while (word := await stream.word()) != b"serving":
            if word is None:
                stderr = await tail(process)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_END_S):
                        await process.wait()  # its exit status arrives after its last output
                raise ended(process, stderr)
            if word == b"need":
                process.stdin.write(package.data)
                await process.stdin.drain()

    async def request(
        self, method: str, params: Mapping[str, Any], body: bytes | FileUnit
    ) -> tuple[dict[str, Any], bytes]:
        if isinstance(body, FileUnit):
            body = await asyncio.to_thread(body.read)
        self._number += 1
        number = self._number
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            if not self.alive:
                raise self._lost()
            head = frames.encode({"id": number, "method": method, "params": dict(params)}, len(body))
            # A request that is given up is still sent to its end: half a frame would swallow the requests after it.
            sending = asyncio.create_task(self._write(head, body, future))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
            await asyncio.shield(sending)
            return await future
        except Exception as error:
            if not _is_break(error):
                raise
            raise self._lost() from None
        finally:
            self._waiting.pop(number, None)

    async def _write(self, head: bytes, body: bytes, answer: asyncio.Future[Any]) -> None:
        async with self._writing:
            for part in (head, *frames.parts(body)):
                if not self.alive:
                    raise self._lost()
                self._process.stdin.write(part)
                await self._drain(answer)

    async def _drain(self, answer: asyncio.Future[Any]) -> None:
        """Wait until the request is on its way, or answered: a connection that broke may never drain."""
        drained = asyncio.ensure_future(self._process.stdin.drain())
        try:
            await asyncio.wait([drained, answer, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await drained

    async def close(self) -> None:
        """End the connection; returns when nothing of it is left in the event loop."""
        self.end()
        await asyncio.wait([self._task, *self._sending])

    def end(self) -> None:
        self._closing = True
        self._task.cancel()

    async def _receive(self) -> None:
        try:
            while (head_size := await self._stream.take(frames.SIZES_BYTES)) is not None:
                first, second = frames.sizes(head_size)
                head, body = await self._stream.take(first), await self._stream.take(second)
                if head is None or body is None:
                    break
                answer = frames.decode(head)
                future = self._waiting.get(answer["id"]) if isinstance(answer.get("id"), int) else None
                if future is not None and not future.done():
                    future.set_result((answer, body))
        except Exception as error:  # whoever waits is told below, and the next request connects again
            if not _is_break(error) and not isinstance(error, (frames.BadFrame, NodeUnavailable)):
                raise
        finally:
            self.alive = False
            if not self._closing:
                with contextlib.suppress(Exception):  # of a broken connection asyncssh raises errors of its own
                    self._said = await tail(self._process)
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._lost())
                    future.exception()  # retrieved: a request that was cancelled meanwhile has no reader
            with contextlib.suppress(Exception):
                await self._stack.aclose()

    def _lost(self) -> NodeUnavailable:
        words = f" ({self._said[-300:]})" if self._said else ""
        action = "check its power and network; its jobs go on, and are asked again"
        return NodeUnavailable(f"{self._host.name}: the connection was lost{words}", action=action)


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_DATA_THREADS, functools.partial(function, *args))


def _is_break(error: Exception) -> bool:
    """Whether an exception is a connection that broke: asyncssh's own are no OSErrors."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "asyncssh"


_SESSIONS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[SshHost, bytes], Session]]
_SESSIONS = weakref.WeakKeyDictionary()
_packed: list[Package] = []


def session(host: SshHost, known_hosts: bytes) -> Session:
    """The session with a host in the running event loop, shared by everybody there."""
    ours = _SESSIONS.setdefault(asyncio.get_running_loop(), {})
    return ours.setdefault((host, known_hosts), Session(host, known_hosts))


def _forget(session: Session) -> None:
    for ours in _SESSIONS.values():
        for key in [key for key, known in ours.items() if known is session]:
            del ours[key]


async def close_session(host: SshHost, known_hosts: bytes) -> None:
    """Close the session with a host that is not used any more, and forget it."""
    session = _SESSIONS.get(asyncio.get_running_loop(), {}).pop((host, known_hosts), None)
    if session is not None:
        await session.close()


async def close_all() -> None:
    """Close the sessions of the running event loop."""
    ours = _SESSIONS.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(session.close() for session in ours.values()))


def _package() -> Package:
    if not _packed:
        _packed.append(pack())
    return _packed[0]
