"""The bootstrap as a process on a node: the command that starts it, its marked lines, the reason of an early end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shlex
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.core.errors import NodeUnavailable
from trainmaster.remote import bootstrap
from trainmaster.targets._answers import clean, encode_order, malformed
from trainmaster.targets.ssh.connect import NoPython

_NOISE_BYTES = 1 << 20  # limit on a login shell's own output before the first marked line
_OLD = "trainmaster-needs-3.10"


def command(python: str, order: Mapping[str, Any]) -> str:
    """One command line for any login shell; its version test runs under every old Python too."""
    source = base64.b64encode(zlib.compress(Path(bootstrap.__file__).read_bytes(), 9)).decode()
    check = f'import sys;sys.version_info<(3,10) and sys.exit("{_OLD} %d.%d"%sys.version_info[:2])'
    program = f'{check};import base64,zlib;exec(zlib.decompress(base64.b64decode("{source}")))'
    text = encode_order(order)
    # The shell prints its process id and becomes Python, so that a Python that hangs on start can be killed.
    first = f"echo; echo {order['nonce']} pid $$; " + 'exec "$0" "$@"'
    return f"exec sh -c {shlex.quote(first)} {shlex.quote(python)} -c {shlex.quote(program)} {text}"


class Stream:
    """Bounded standard output. Protocol lines begin with a mark; everything else is the shell's own output."""

    def __init__(self, process: Any, nonce: bytes) -> None:
        self._stdout = process.stdout
        self._mark = b"\n" + nonce + b" "
        self._held = bytearray()
        self.received = 0

    async def word(self) -> bytes | None:
        """The rest of the next marked line; None at the end of the stream."""
        while True:
            at = self._held.find(self._mark)
            end = self._held.find(b"\n", at + 1) if at >= 0 else -1
            if end >= 0:
                word = bytes(self._held[at + len(self._mark) : end])
                del self._held[: end + 1]
                return word
            if len(self._held) > _NOISE_BYTES:
                raise malformed(f"{len(self._held) >> 20} MiB without a protocol line")
            if not await self._more():
                return None

    async def take(self, size: int) -> bytes | None:
        """The next bytes, removed from the stream; None if it ends before."""
        data = await self.exactly(size)
        del self._held[:size]
        return data

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


async def tail(process: Any) -> str:
    """The start of its standard error."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(1.0):
            return clean(bytes(await process.stderr.read(4096)).decode("utf-8", errors="replace")).strip()
    return ""


def ended(process: Any, stderr: str) -> NodeUnavailable:
    """Error for a process that ended without an answer. Exit status None: the connection was lost."""
    status = process.exit_status
    if _OLD in stderr:
        version = stderr.partition(_OLD)[2].split()[0] if stderr.partition(_OLD)[2].split() else "older"
        action = "install Python 3.10 or newer there and name it: python: /usr/bin/python3.12"
        return NoPython(f"its Python is {version}; 3.10 or newer is needed", action=action)
    if status == 127 or (status == 126 and "ermission" in stderr):
        action = "install Python 3.10 or newer there, or name it in the hosts file: python: /path/to/python3"
        return NoPython(f"there is no such Python on it: {stderr[-200:]}", action=action)
    if status is None and process.exit_signal is None:
        action = "check its power and network; then check it again"
        return NodeUnavailable("the connection was lost before it answered", action=action)
    how = f"with {status}" if status is not None else f"by signal {process.exit_signal[0]}"
    return NodeUnavailable(
        f"its Python ended {how} without an answer: {stderr[-300:]}", action="run its Python on the node by hand"
    )
