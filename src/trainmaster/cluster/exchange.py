"""Ask one machine over SSH: bring the node half, run the checks or other modules of it there, take back one answer.

Nothing need be installed on the machine but Python 3.11. One process and one exchange: the machine says whether it
needs the package, gets it, and prints an answer with its length and hash. What comes back is not trusted: it is
bounded, its framing is checked, and its files are names and texts, never links, modes or devices.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import re
import secrets
import shlex
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path, PurePosixPath
from typing import Any

from trainmaster.cluster import bootstrap
from trainmaster.cluster.hosts import SshHost
from trainmaster.cluster.ssh import CONNECT_TIMEOUT_S, CannotAsk, connect, explain

FOLDERS = ("core", "node", "checks", "bench", "models", "datasets", "train")  # the node half, with what bench computes
HANDSHAKES = 64  # at once: each costs this machine some CPU; waiting for a verdict costs it nothing
_NOISE_BYTES = 1 << 20  # what a login shell may print before our first word
_END_S = 5.0
_OLD = "trainmaster-needs-3.11"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The node half as one zip file; `digest` names its content."""

    digest: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a machine said: its health as text, what it captured, and whether the package had to be sent."""

    health: str
    files: Mapping[str, str]
    sent_bytes: int
    received_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One program to start on a machine: `python -m MODULE WORDS`, with these variables beside the session's own."""

    module: str
    words: Sequence[str] = ()
    env: Mapping[str, str] = dataclass_field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How such a program ended. code None: it was still there at the deadline, or stopped; `state` says which."""

    code: int | None
    state: str | None  # the letter of /proc/PID/stat, where it had not ended
    out: str
    err: str  # its end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """One whole answer, as bytes."""

    data: bytes
    sent_bytes: int
    received_bytes: int
    took_s: float


def pack(root: Path | None = None) -> Package:
    """The node half of this installation."""
    root = root or Path(__file__).parents[1]
    paths = [root / "__init__.py", *(path for name in FOLDERS for path in (root / name).rglob("*") if path.is_file())]
    files = {
        f"trainmaster/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(paths)
        if "__pycache__" not in path.parts
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return Package(digest=bootstrap.tree_digest(files), data=packed.getvalue())


async def ask(
    host: SshHost,
    known_hosts: bytes,
    package: Package,
    words: Sequence[str],
    *,
    timeout_s: float,
    gate: asyncio.Semaphore,
) -> Answer:
    """Run `python -m trainmaster.checks WORDS` on a machine. CannotAsk where no answer can be had in time."""
    reply = await _exchange(host, known_hosts, package, {"words": list(words)}, timeout_s=timeout_s, gate=gate)
    health, files = _unwrap(reply.data)
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
    runs: Sequence[Run],
    *,
    timeout_s: float,
    gate: asyncio.Semaphore,
) -> list[Ran]:
    """Run these modules of the node half on a machine, all at once, until the last has ended or the time is over.

    Cancelling it ends them there: the machine's own half kills what it started when nobody listens any more.
    """
    wanted = [{"module": run.module, "words": list(run.words), "env": dict(run.env)} for run in runs]
    reply = await _exchange(host, known_hosts, package, {"runs": wanted}, timeout_s=timeout_s, gate=gate)
    return _unwrap_runs(reply.data, len(runs))


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
            "deadline_s": left - min(3.0, left / 5),  # so that its own word, which says where it hung, comes first
            **wanted,
        }
        process_id: list[int] = []
        try:
            async with asyncio.timeout(left):
                process = await connection.create_process(_command(host.python, order), encoding=None)
                return await _talk(process, nonce, package, started, process_id)
        except TimeoutError:
            await _end(connection, process_id)
            action = "log in and see what its Python or its file system waits for; reboot it if it stays"
            raise CannotAsk(f"it let us in and then gave no answer in {timeout_s:g} s", action=action) from None
        except CannotAsk:
            raise
        except Exception as wrong:
            raise explain(wrong, host, known_hosts, timeout_s=timeout_s) from None


def _command(python: str, order: Mapping[str, Any]) -> str:
    """One line for any login shell; its first words are read by every Python there is, old ones too."""
    source = base64.b64encode(zlib.compress(Path(bootstrap.__file__).read_bytes(), 9)).decode()
    check = f'import sys;sys.version_info<(3,11) and sys.exit("{_OLD} %d.%d"%sys.version_info[:2])'
    program = f'{check};import base64,zlib;exec(zlib.decompress(base64.b64decode("{source}")))'
    text = base64.b64encode(json.dumps(order).encode()).decode()
    # The shell tells its number and becomes Python, so that we can end a Python that hangs before it reads a word.
    first = f"echo; echo {order['nonce']} pid $$; " + 'exec "$0" "$@"'
    return f"exec sh -c {shlex.quote(first)} {shlex.quote(python)} -c {shlex.quote(program)} {text}"


async def _end(connection: Any, process_id: Sequence[int]) -> None:
    """End what hangs there. A second command, because sshd passes no signals on where root logs in."""
    with contextlib.suppress(Exception):  # it hangs, after all; that is told already
        async with asyncio.timeout(_END_S):
            for number in process_id:
                await connection.run(f"kill -TERM -- -{number}")


async def _talk(process: Any, nonce: str, package: Package, started: float, process_id: list[int]) -> _Reply:
    """Its words, one after the other, until the answer."""
    stream, sent = _Stream(process, nonce.encode()), 0
    while True:
        word = await stream.word()
        if word is None:
            raise _ended(process, await _tail(process))
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
            raise _rubbish(f"it says {word[:60]!r}")
        data = await stream.exactly(int(match[1]))
        if data is None or hashlib.sha256(data).hexdigest().encode() != match[2]:
            raise _rubbish("its answer was cut off or damaged on its way")
        return _Reply(
            data=data,
            sent_bytes=sent,
            received_bytes=stream.received,
            took_s=round(time.monotonic() - started, 3),
        )


def _parse(data: bytes) -> object:
    """The document of an answer; CannotAsk where it only says what went wrong."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise _rubbish("its answer is no JSON") from None
    if isinstance(answer, dict) and isinstance(answer.get("wrong"), str):
        at = answer.get("at")
        where = f"; it was in {at[:60]}" if isinstance(at, str) else ""
        action = f"run `trainmaster check{f' --only {at[:60]}' if isinstance(at, str) else ''}` on it by hand"
        raise CannotAsk(clean(answer["wrong"])[:600] + clean(where), action=clean(action))
    return answer


def _unwrap_runs(data: bytes, wanted: int) -> list[Ran]:
    answer = _parse(data)
    runs = answer.get("runs") if isinstance(answer, dict) else None
    if not isinstance(runs, list) or len(runs) != wanted:
        raise _rubbish(f"it does not tell of {wanted} programs")
    found = []
    for run in runs:
        code, state, out, err = (
            (run.get(key) for key in ("code", "state", "out", "err")) if isinstance(run, dict) else [0] * 4
        )
        if not isinstance(code, int | None) or not isinstance(state, str | None):
            raise _rubbish("a program of it ended in no way there is")
        if not isinstance(out, str) or not isinstance(err, str):
            raise _rubbish("a program of it printed no text")
        found.append(Ran(code=code, state=state, out=out, err=clean(err)))
    return found


def _unwrap(data: bytes) -> tuple[str, dict[str, str]]:
    answer = _parse(data)
    health, files = (answer.get("health"), answer.get("files")) if isinstance(answer, dict) else (None, None)
    if not isinstance(health, str) or not isinstance(files, dict):
        raise _rubbish("its answer has no health and no files")
    for name, text in files.items():
        if not isinstance(text, str) or not _safe(name):
            raise _rubbish(f"it names a file {name[:80]!r}")
    return health, files


def _safe(name: str) -> bool:
    """A path that stays inside its folder: what CapturingHost writes, and nothing cleverer."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and len(part.encode()) <= 255 and part.isprintable() for part in parts)
    return plain and len(parts) <= 64 and (name == "answers.json" or parts[0] in ("files", "commands"))


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Put a capture into a folder of its own that is not there yet."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        path = folder / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", errors="replace"))


def clean(text: str) -> str:
    """Text of a machine nobody trusts, for a terminal: what moves the cursor becomes visible."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


async def _tail(process: Any) -> str:
    """The last it said on standard error."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(1.0):
            return clean(bytes(await process.stderr.read(4096)).decode("utf-8", errors="replace")).strip()
    return ""


def _ended(process: Any, said: str) -> CannotAsk:
    """It ended before it answered. Exit status None: the connection was lost, nothing ended."""
    status = process.exit_status
    if _OLD in said:
        version = said.partition(_OLD)[2].split()[0] if said.partition(_OLD)[2].split() else "older"
        action = "install Python 3.11 or newer there and name it: python: /usr/bin/python3.11"
        return CannotAsk(f"its Python is {version}; the checks need 3.11 or newer", action=action)
    if status == 127 or (status == 126 and "ermission" in said):
        action = "install Python 3.11 or newer there, or name it in the hosts file: python: /path/to/python3"
        return CannotAsk(f"there is no such Python on it: {said[-200:]}", action=action)
    if status is None and process.exit_signal is None:
        action = "look at its power and network; then check it again"
        return CannotAsk("the connection was lost before it answered", action=action)
    how = f"with {status}" if status is not None else f"by signal {process.exit_signal[0]}"
    return CannotAsk(
        f"its Python ended {how} without an answer: {said[-300:]}", action="see what that says on the node"
    )


def _rubbish(what: str) -> CannotAsk:
    return CannotAsk(f"it answered rubbish: {what[:300]}", action="look at what its login shell and its Python print")


class _Stream:
    """Standard output, bounded. Our words stand after a mark on a line of their own; the rest is a shell's noise."""

    def __init__(self, process: Any, nonce: bytes) -> None:
        self._stdout = process.stdout
        self._mark = b"\n" + nonce + b" "
        self._held = bytearray()
        self.received = 0

    async def word(self) -> bytes | None:
        """What stands behind the next mark, to the end of its line; None at the end of the stream."""
        while True:
            at = self._held.find(self._mark)
            end = self._held.find(b"\n", at + 1) if at >= 0 else -1
            if end >= 0:
                word = bytes(self._held[at + len(self._mark) : end])
                del self._held[: end + 1]
                return word
            if len(self._held) > _NOISE_BYTES:
                raise _rubbish(f"{len(self._held) >> 20} MiB without a word for us")
            if not await self._more():
                return None

    async def exactly(self, size: int) -> bytes | None:
        while len(self._held) < size:
            if not await self._more():
                return None
        return bytes(self._held[:size])

    async def _more(self) -> bool:
        chunk = await self._stdout.read(1 << 16)
        self._held += chunk
        self.received += len(chunk)
        return bool(chunk)
