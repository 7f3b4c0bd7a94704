"""First process of a simulated instance: python -I -S box_init.py COMMAND…

It runs the command (sshd) and adopts every orphan below it, so that a program which makes itself a daemon stays one of
its descendants. It ends when its standard input closes, which also happens when the simulator is killed, or when sshd
ends; then it kills all its descendants. Standard library only: it is run as a file, without the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_REAP_S = 0.2


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        # Standard input stays with this process: a program of the instance must not hold it open or read from it.
        nothing = os.open(os.devnull, os.O_RDONLY)
        server = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, nothing, 0)])
        while not _reaped(server):
            readable, _, _ = select.select([0], [], [], _REAP_S)
            if readable and not os.read(0, 1):
                break
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _kill_descendants()


def _reaped(server: int) -> bool:
    """Reap dead children; whether sshd was one of them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == server:
                return True
            if pid == 0:
                return False
    return True


def _kill_descendants() -> None:
    """Freeze first, until nothing new appears: a tree that keeps forking cannot outrun this."""
    while pids := _descendants():
        frozen: set[int] = set()
        while new := pids - frozen:
            _send(new, signal.SIGSTOP)
            frozen |= new
            pids = _descendants()
        _send(frozen, signal.SIGKILL)
        _reaped(0)
        time.sleep(0.005)


def _descendants() -> set[int]:
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (names alone, and pathlib would be imported for them)
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    parents[int(name)] = int(fields[1])
    pids = {os.getpid()}
    while below := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= below
    return pids - {os.getpid()}


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
