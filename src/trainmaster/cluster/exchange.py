"""One exchange with a node over SSH: send the node half, run checks or other modules of it, receive one answer.

The node needs Python 3.11 and nothing else. One process, one exchange: the node requests the package if it lacks it,
and prints an answer with its length and hash. The answer is untrusted: its size is bounded, its framing is checked, and
its files are names and texts, never links, modes or devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path, PurePosixPath
from typing import Any

from trainmaster.remote import bootstrap
from trainmaster.remote.package import Package
from trainmaster.targets.ssh.channel import Stream, clean, command, ended, malformed, tail
from trainmaster.targets.ssh.connect import CONNECT_TIMEOUT_S, NodeUnavailable, connect, explain
from trainmaster.targets.ssh.hosts import SshHost

HANDSHAKES = 64  # concurrent: a handshake costs CPU here; waiting for a verdict costs nothing
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of a node: its health document as text, its capture, and the bytes moved."""

    health: str
    files: Mapping[str, str]
    sent_bytes: int
    received_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to start on a node: `python -m MODULE WORDS`, with additional environment variables."""

    module: str
    words: Sequence[str] = ()
    env: Mapping[str, str] = dataclass_field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """How a program ended. code None: still running at the deadline, or stopped; see `state`."""

    code: int | None
    state: str | None  # the letter of /proc/PID/stat of a program that had not ended
    out: str
    err: str  # the end of standard error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """One complete answer, as bytes."""

    data: bytes
    sent_bytes: int
    received_bytes: int
    took_s: float


async def ask(
    host: SshHost,
    known_hosts: bytes,
    package: Package,
    words: Sequence[str],
    *,
    timeout_s: float,
    gate: asyncio.Semaphore,
) -> Answer:
    """Run `python -m trainmaster.checks WORDS` on a node. NodeUnavailable if no answer arrives in time."""
    reply = await _exchange(host, known_hosts, package, {"words": list(words)}, timeout_s=timeout_s, gate=gate)
    health, files = unwrap(reply.data)
    return Answer(
        health=health,
        files=files,
        sent_bytes=reply.sent_bytes,
        received_bytes=reply.received_bytes,
        took_s=reply.took_s,
    )


async def start(
    host: SshHost,
    known_hosts: bytes,
    package: Package,
    runs: Sequence[Program],
    *,
    timeout_s: float,
    gate: asyncio.Semaphore,
) -> list[ProgramResult]:
    """Run modules of the node half on a node, all at once, until the last has ended or the time is over.

    Cancelling ends them there: the bootstrap kills its children when the connection closes.
    """
    wanted = [{"module": run.module, "words": list(run.words), "env": dict(run.env)} for run in runs]
    reply = await _exchange(host, known_hosts, package, {"runs": wanted}, timeout_s=timeout_s, gate=gate)
    return unwrap_runs(reply.data, len(runs))


async def _exchange(
    host: SshHost,
    known_hosts: bytes,
    package: Package,
    wanted: Mapping[str, Any],
    *,
    timeout_s: float,
    gate: asyncio.Semaphore,
) -> _Reply:
    async with gate:
        started = time.monotonic()
        stack = contextlib.AsyncExitStack()
        connection = await stack.enter_async_context(
            connect(host, known_hosts, timeout_s=min(timeout_s, CONNECT_TIMEOUT_S))
        )
    async with stack:
        left = timeout_s - (time.monotonic() - started)
        nonce = secrets.token_hex(16)
        order = {
            "digest": package.digest,
            "size": len(package.data),
            "nonce": nonce,
            "deadline_s": left - min(3.0, left / 5),  # so that the node's own report of where it hung arrives first
            **wanted,
        }
        process_id: list[int] = []
        try:
            async with asyncio.timeout(left):
                process = await connection.create_process(command(host.python, order), encoding=None)
                return await _talk(process, nonce, package, started, process_id)
        except TimeoutError:
            await _end(connection, process_id)
            action = "log in and check what its Python or file system waits for; reboot it if it stays"
            raise NodeUnavailable(
                f"it accepted the login, then gave no answer in {timeout_s:g} s", action=action
            ) from None
        except NodeUnavailable:
            raise
        except Exception as wrong:
            raise explain(wrong, host, known_hosts, timeout_s=timeout_s) from None


async def _end(connection: Any, process_id: Sequence[int]) -> None:
    """Kill the hung process. By a second command, because sshd forwards no signals for root logins."""
    with contextlib.suppress(Exception):  # the hang is reported already
        async with asyncio.timeout(_END_S):
            for number in process_id:
                await connection.run(f"kill -TERM -- -{number}")


async def _talk(process: Any, nonce: str, package: Package, started: float, process_id: list[int]) -> _Reply:
    """Read marked lines until the answer."""
    stream, sent = Stream(process, nonce.encode()), 0
    while True:
        word = await stream.word()
        if word is None:
            raise ended(process, await tail(process))
        if found := re.fullmatch(rb"pid (\d{1,9})", word):
            process_id[:] = [int(found[1])]
            continue
        if word == b"need":
            sent = len(package.data)
            process.stdin.write(package.data)
            await process.stdin.drain()
            continue
        match = re.fullmatch(rb"answer (\d{1,9}) ([0-9a-f]{64})", word)
        if not match or int(match[1]) > bootstrap.MAX_ANSWER_BYTES:
            raise malformed(f"unexpected line {word[:60]!r}")
        data = await stream.exactly(int(match[1]))
        if data is None or hashlib.sha256(data).hexdigest().encode() != match[2]:
            raise malformed("the answer was cut off or damaged in transit")
        return _Reply(
            data=data,
            sent_bytes=sent,
            received_bytes=stream.received,
            took_s=round(time.monotonic() - started, 3),
        )


def _parse(data: bytes) -> object:
    """The document of an answer; NodeUnavailable where it reports an error."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise malformed("the answer is not JSON") from None
    if isinstance(answer, dict) and isinstance(answer.get("wrong"), str):
        at = answer.get("at")
        where = f"; it was in {at[:60]}" if isinstance(at, str) else ""
        action = f"run `trainmaster check{f' --only {at[:60]}' if isinstance(at, str) else ''}` on it by hand"
        raise NodeUnavailable(clean(answer["wrong"])[:600] + clean(where), action=clean(action))
    return answer


def find_answer(body: bytes, nonce: str) -> bytes | None:
    """The answer in a program's whole output, after whatever the site or the image printed; None without one."""
    found = re.search(rb"\n" + nonce.encode() + rb" answer (\d{1,9}) ([0-9a-f]{64})\n", body)
    if found is None:
        return None
    data = body[found.end() : found.end() + int(found[1])]
    if hashlib.sha256(data).hexdigest().encode() != found[2]:
        raise malformed("the answer was cut off or damaged in transit")
    return data


def unwrap_runs(data: bytes, wanted: int) -> list[ProgramResult]:
    """Results of the programs in an answer."""
    answer = _parse(data)
    runs = answer.get("runs") if isinstance(answer, dict) else None
    if not isinstance(runs, list) or len(runs) != wanted:
        raise malformed(f"not {wanted} program results")
    found = []
    for run in runs:
        code, state, out, err = (
            (run.get(key) for key in ("code", "state", "out", "err")) if isinstance(run, dict) else [0] * 4
        )
        if not isinstance(code, int | None) or not isinstance(state, str | None):
            raise malformed("a program result without exit code or state")
        if not isinstance(out, str) or not isinstance(err, str):
            raise malformed("a program result without text")
        found.append(ProgramResult(code=code, state=state, out=out, err=clean(err)))
    return found


def unwrap(data: bytes) -> tuple[str, dict[str, str]]:
    """Health document and files of an answer."""
    answer = _parse(data)
    health, files = (answer.get("health"), answer.get("files")) if isinstance(answer, dict) else (None, None)
    if not isinstance(health, str) or not isinstance(files, dict):
        raise malformed("no health document and no files")
    for name, text in files.items():
        if not isinstance(text, str) or not _safe(name):
            raise malformed(f"illegal file name {name[:80]!r}")
    return health, files


def _safe(name: str) -> bool:
    """Whether a path stays inside its folder and has the form that CapturingHost writes."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and len(part.encode()) <= 255 and part.isprintable() for part in parts)
    return plain and len(parts) <= 64 and (name == "answers.json" or parts[0] in ("files", "commands"))


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write a capture into a new folder."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        path = folder / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", errors="replace"))
