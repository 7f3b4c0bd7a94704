"""Channel for bulk data over the machine's own `ssh` program: its process encrypts, this one only moves bytes.

asyncssh spends 4 s of this process on a gigabyte, and the event loop serves nothing else meanwhile; `ssh` takes a
quarter of that, on another core. Requests are the frames of the session, one at a time, from a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.core.errors import NodeUnavailable
from trainmaster.remote import frames
from trainmaster.remote.package import Package
from trainmaster.remote.transfer import Changed, FileUnit
from trainmaster.targets._answers import malformed
from trainmaster.targets.ssh.connect import CIPHERS, CONNECT_TIMEOUT_S, KEEPALIVE_S, KEEPALIVES_LOST
from trainmaster.targets.ssh.hosts import SshHost

_PIPE_BYTES = 1 << 20
_NOISE_BYTES = 1 << 20  # limit on a login shell's own output before the first marked line


def is_possible(host: SshHost) -> bool:
    """Whether `ssh` can reach the host as asyncssh does: a jump host would need options of its own."""
    return shutil.which("ssh") is not None and host.jump is None


class DataPipe:
    """One `ssh` process with a data server at the node's end. Every method but `close` blocks."""

    def __init__(self, process: subprocess.Popen[bytes], known_hosts: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._known_hosts = process, known_hosts
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        self._number = 0
        self._using, self._closed = threading.Lock(), False
        with contextlib.suppress(OSError):  # fewer switches between the two processes
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    @classmethod
    def open(cls, host: SshHost, known_hosts: bytes, package: Package) -> DataPipe:
        """Connect and start the data server; NodeUnavailable where that fails. The package must be at the node."""
        nonce = secrets.token_hex(16)
        fd, name = tempfile.mkstemp(prefix="trainmaster-known-hosts-")
        with os.fdopen(fd, "wb") as file:
            file.write(known_hosts)
        words = [*_words(host, name), _command(host.python, package.digest, nonce)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
        made = cls(process, Path(name))
        try:
            made._await_serving(nonce.encode())
        except BaseException:
            made.close()
            raise
        return made

    def request(self, method: str, params: Mapping[str, Any], body: bytes | FileUnit) -> tuple[dict[str, Any], bytes]:
        """The answer to a request: its head and its body."""
        self._number += 1
        head = {"id": self._number, "method": method, "params": dict(params)}
        try:
            with self._using:
                if self._closed:
                    raise _lost()
                frames.write(self._in, frames.encode(head, len(body)))
                if isinstance(body, FileUnit):
                    body.send(self._in)
                else:
                    frames.write(self._in, body)
                head_size, body_size = frames.sizes(self._read(frames.SIZES_BYTES))
                answer = frames.decode(self._read(head_size))
                data = self._read(body_size)
        except (OSError, frames.BadFrame):
            raise _lost() from None
        except Changed:
            self._process.kill()  # a part of the body is sent: no further request can be told from it
            raise
        if answer.get("id") != self._number:
            raise malformed("an answer to another request")
        return answer, data

    def close(self) -> None:
        """End the process; a request that is under way fails. Safe from any thread."""
        self._process.kill()
        self._process.wait()
        with self._using:  # a thread that still writes would meet another file under the same number
            self._closed = True
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self._known_hosts.unlink(missing_ok=True)

    def _await_serving(self, nonce: bytes) -> None:
        held, mark = b"", b"\n" + nonce + b" serving\n"
        while not held.endswith(mark):
            piece = os.read(self._out, 1)  # not one byte of the frames behind it
            if not piece or len(held) > _NOISE_BYTES:
                raise _lost()
            held += piece

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            got = os.readv(self._out, [view[done:]])
            if not got:
                raise _lost()
            done += got
        return bytes(data) if size < _PIPE_BYTES else data  # type: ignore[return-value]  # not copied once more


def _words(host: SshHost, known_hosts: str) -> list[str]:
    options = {
        "BatchMode": "yes", "StrictHostKeyChecking": "yes", "UserKnownHostsFile": known_hosts,
        "GlobalKnownHostsFile": "/dev/null", "PreferredAuthentications": "publickey", "ControlPath": "none",
        "ClearAllForwardings": "yes", "Compression": "no", "Ciphers": CIPHERS, "LogLevel": "ERROR",
        "ConnectTimeout": f"{CONNECT_TIMEOUT_S:.0f}", "ServerAliveInterval": f"{KEEPALIVE_S:.0f}",
        "ServerAliveCountMax": str(KEEPALIVES_LOST),
    }  # fmt: skip
    words = ["ssh", "-T", *(f"-o{name}={value}" for name, value in options.items())]
    words += ["-p", str(host.port)] if host.port else []
    words += ["-l", host.user] if host.user else []
    words += ["-i", host.key, "-oIdentitiesOnly=yes"] if host.key else []
    return [*words, "--", host.host]


def _command(python: str, digest: str, nonce: str) -> str:
    """Start the data server from the package that the session has verified; no bootstrap in between."""
    script = (
        f'p="${{XDG_CACHE_HOME:-$HOME/.cache}}/trainmaster/{digest}"; echo; echo {nonce} serving; '
        f'PYTHONPATH="$p" PYTHONSAFEPATH=1 exec {shlex.quote(python)} -S "$p/trainmaster/remote/data.py"'
    )
    return f"exec sh -c {shlex.quote(script)}"


def _lost() -> NodeUnavailable:
    return NodeUnavailable("the data connection was lost", action="check its power and network")
