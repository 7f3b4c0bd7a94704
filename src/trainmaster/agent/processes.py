"""Nothing of an attempt stays behind: ranks die with the agent, and leftovers are found by their environment.

Four nets, each for what slips through the one before. A rank asks the kernel to be killed when the agent dies
(node/owner.py). The agent adopts every orphan below it, so a grandchild that made itself a daemon is still below the
agent. Every process of an attempt carries its name in the environment, which is how they are found when the agent is
gone. And the agent's guard, a process of its own, does just that when the agent is killed. Agent and guard end only
what this agent has started: a second agent of the attempt lives to say why it starts nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from trainmaster.core.plan import AGENT_VARIABLE, ATTEMPT_VARIABLE
from trainmaster.node.owner import is_gone

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PROC = Path("/proc")


def adopt_orphans() -> None:
    """Orphans below this process become its children instead of init's. Without Linux: nothing."""
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_guard(clean: Callable[[], object]) -> None:
    """Fork a process that waits for the death of this one and then calls `clean`.

    What no signal of the kernel reaches ends so too: containers, and what a rank has started. A sweep of the attempt
    ends the guard with the rest. Called before there is a second thread.
    """
    ours, _ = os.pipe()  # the kernel closes the other end when this process ends
    if os.fork():
        os.close(ours)
        return
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Not one descriptor of the agent stays open here: its lock would be held on.
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        for fd in [int(entry.name) for entry in (_PROC / "self" / "fd").iterdir()]:
            if fd > 2 and fd != ours:
                with contextlib.suppress(OSError):  # the one that listed them
                    os.close(fd)
        os.read(ours, 1)
        clean()
    finally:
        os._exit(0)


def living(attempt: str, *, agent: str | None = None) -> set[int]:
    """Every live process of an attempt but this one: those that carry its name, and all below them.

    With the name of an agent: of those it has started, and of itself.
    """
    mark = f"{ATTEMPT_VARIABLE}={attempt}" if agent is None else f"{AGENT_VARIABLE}={agent}"
    parents = _parents()
    members = {pid for pid in parents if mark.encode() in _environment(pid)}
    if agent is not None and not is_gone(agent):
        members.add(int(agent.partition(":")[0]))
    while below := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= below
    return members - {os.getpid()}


def kill_all(attempt: str, *, within_s: float, agent: str | None = None) -> set[int]:
    """Kill every `living` process; returns those that would not die (none, but for a sick kernel)."""
    end = time.monotonic() + within_s
    left: set[int] = set()
    while True:
        # Frozen first, until nothing new appears: a tree that keeps forking cannot outrun the killing.
        while new := living(attempt, agent=agent) - left:
            _send(new, signal.SIGSTOP)
            left |= new
        _send(left, signal.SIGKILL)
        reap(())
        left = living(attempt, agent=agent)
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
