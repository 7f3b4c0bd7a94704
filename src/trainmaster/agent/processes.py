"""Nothing of an attempt stays behind: ranks die with the agent, and leftovers are found by their environment.

Three nets, each for what slips through the one before. A rank asks the kernel to be killed when the agent dies. The
agent adopts every orphan below it, so a grandchild that made itself a daemon is still below the agent. And every
process of an attempt carries its name in the environment, which is how they are found when the agent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from trainmaster.core.plan import ATTEMPT_VARIABLE

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def adopt_orphans() -> None:
    """Orphans below this process become its children instead of init's. Without Linux: nothing."""
    if (prctl := _prctl()) is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(agent: int) -> Callable[[], None]:
    """What a child runs between fork and exec so that it is killed when `agent` dies, however that happens.

    The kernel counts the death of the thread that forked, so ranks are started by the agent's main thread.
    """
    prctl = _prctl()  # looked up here: between fork and exec only the plainest calls are safe

    def arm() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != agent:  # it died before the request was heard
                os._exit(1)

    return arm


def _prctl() -> Any:
    return getattr(ctypes.CDLL(None), "prctl", None)


def living(attempt: str) -> set[int]:
    """Every live process of an attempt but this one: those that carry its name, and all below them."""
    mark = f"{ATTEMPT_VARIABLE}={attempt}".encode()
    parents = _parents()
    members = {pid for pid in parents if mark in _environment(pid)}
    while below := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= below
    return members - {os.getpid()}


def kill_all(attempt: str, *, within_s: float) -> set[int]:
    """Kill every process of an attempt but this one; returns those that would not die (none, but for a sick kernel)."""
    end = time.monotonic() + within_s
    left: set[int] = set()
    while True:
        # Frozen first, until nothing new appears: a tree that keeps forking cannot outrun the killing.
        while new := living(attempt) - left:
            _send(new, signal.SIGSTOP)
            left |= new
        _send(left, signal.SIGKILL)
        reap(())
        left = living(attempt)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.01)


def reap(known: Collection[int]) -> None:
    """Reap adopted orphans. Children in `known` are waited for elsewhere."""
    me = os.getpid()
    for pid, parent in _parents(dead=True).items():
        if parent == me and pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _send(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _parents(*, dead: bool = False) -> dict[int, int]:
    """Each live (or each dead and not yet collected) process and its parent."""
    parents: dict[int, int] = {}
    if not _PROC.is_dir():
        return parents
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # "pid (name) state ppid …": a name may hold anything, so count from its last bracket.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if (state in "ZX") == dead:
            parents[int(entry.name)] = int(parent)
    return parents


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return []
