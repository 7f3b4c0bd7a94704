"""An executable that can stand where a test hands out the path of Python: `-m` and `-c` run in the fork server.

It passes its words, environment, folder and streams on, waits, and ends as the program did; a signal that ends it ends
the program. A program of another kind gets the real interpreter. The program is not the process that was started: a
test that stops or kills by process number, or reads /proc, hands out the real interpreter. With `deep`
it starts its own children like this too: not for an agent, which finds its ranks by their process numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path

from fork_server import Child, ForkServer

# Isolated and without site-packages: it starts in 20 ms. By the shell: a `#!` line takes no path with a space, and the
# first lines are a string to Python.
_PROGRAM = """#!/bin/sh
'''exec' "{python}" -IS "$0" "$@"
' '''
import json, os, signal, socket, sys
words = sys.argv[1:]
while words[:1] in (["-u"], ["-I"], ["-S"]):
    words.pop(0)
if words[:2] == ["-W", "ignore"]:
    del words[:2]
if words[:1] not in (["-m"], ["-c"]):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.connect({address!r})
    socket.send_fds(line, [json.dumps([words, dict(os.environ), os.getcwd()]).encode()], [0, 1, 2])
    code = int(line.recv(100) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class WarmPython:
    """The executable and the thread that answers it."""

    def __init__(self, server: ForkServer, *, deep: bool = False) -> None:
        self._server, self._deep = server, deep
        self._folder = Path(tempfile.mkdtemp(prefix="tm-python-"))  # an address holds 107 characters at most
        self.path = self._folder / "python"
        address = str(self._folder / "line")
        self.path.write_text(_PROGRAM.format(python=sys.executable, address=address))
        self.path.chmod(0o755)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(address)
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        shutil.rmtree(self._folder)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                line, _ = self._socket.accept()
                threading.Thread(target=self._run, args=(line,), daemon=True).start()

    def _run(self, line: socket.socket) -> None:
        with line:
            packet, descriptors, _, _ = socket.recv_fds(line, 1 << 17, 3)
            (option, first, *words), env, cwd = json.loads(packet)
            program = [first, *words] if option == "-m" else ["-c", first, *words]
            child = self._server.start(
                *program,
                env=env,
                cwd=Path(cwd),
                stdin=descriptors[0],
                out=descriptors[1],
                err=descriptors[2],
                prepare=(f"{use.__module__}:{use.__name__}", str(self.path)) if self._deep else (),
            )
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                line.send(str(self._wait(child, line)).encode())

    @staticmethod
    def _wait(child: Child, line: socket.socket) -> int:
        while (code := child.poll()) is None:
            if select.select([line], [], [], 0.01)[0]:  # it sends nothing more: it was killed
                child.kill()
        return code


def use(python: str) -> None:
    """Make a program in the fork server start its own children with this executable."""
    sys.executable = python
