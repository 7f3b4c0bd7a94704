"""Nothing outlives its owner: a process asks here to be killed with another, or whether that one still lives.

A process is named by its number and its start, because numbers are used again. Linux only; elsewhere nothing is known
to be gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PROC = Path("/proc")
_LOOKED_AT = 64  # processes below one, at most: the look is taken every second
# What launchers set for each rank. Programs between a launcher and its rank (a shell, numactl) have them too.
_OF_A_RANK = (
    "RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "FLUX_TASK_RANK",
)  # fmt: skip
# Set only by launchers that stay until their ranks have ended. RANK alone may be a shell's that is long gone.
_OF_A_LAUNCHER = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "FLUX_TASK_RANK")
# Set by torchrun and no other launcher: torch/distributed/elastic/agent/server/local_elastic_agent.py
_OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"
GONE = "0:0"  # name of no process


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """What a child runs between fork and exec so that it gets a signal when `parent` dies, however that happens.

    The kernel counts the death of the thread that forked: a child is started by a thread that stays, as the main thread
    does. The request is lost where the program changes its user.
    """
    prctl = _prctl()  # looked up here: between fork and exec only the plainest calls are safe

    def arm() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
            if os.getppid() != parent:  # it died before the request was heard
                os._exit(1)

    return arm


def die_with_variable(variable: str) -> None:
    """Have the kernel kill this process when the launcher dies whose process number is in `variable`."""
    if (parent := os.environ.get(variable)) is not None:
        die_with(int(parent))()


def _prctl() -> Any:
    return getattr(ctypes.CDLL(None), "prctl", None)


def name_process(pid: int | None = None) -> str:
    """A process as one word, this one by default: number and start."""
    pid = os.getpid() if pid is None else pid
    return f"{pid}:{start_of(pid) or ''}"


def is_gone(word: str) -> bool:
    """Whether the process of such a word has ended. A word that names none, or no /proc, proves nothing."""
    pid, _, start = word.partition(":")
    return bool(start) and pid.isdecimal() and (_PROC / "self").exists() and start_of(int(pid)) != start


def start_of(pid: int) -> str | None:
    """When a process started, in clock ticks; None where there is none, or it has ended and waits for its parent."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else fields[19]


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP, a debugger) and does nothing until it is told to go on."""
    fields = _stat(pid)
    return fields is not None and fields[0] in ("T", "t")


def find_stopped(pid: int) -> list[int]:
    """A process and those below it that are stopped. Those that other threads than the first started are not seen."""
    waiting, seen, stopped = [pid], 0, []
    while waiting and seen < _LOOKED_AT:
        pid, seen = waiting.pop(0), seen + 1
        if is_stopped(pid):
            stopped.append(pid)
        with contextlib.suppress(OSError, ValueError):  # it has ended, or a kernel without the list
            waiting += map(int, (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split())
    return stopped


def is_fork_server(pid: int) -> bool:
    """Whether it forks the ranks of a node. They have its command line, and write over the room in its environment."""
    from trainmaster.core.plan import ROOM_VARIABLE  # not where a guard starts

    return any(word.startswith(f"{ROOM_VARIABLE}=-".encode()) for word in _environment(pid))


def find_launcher(environ: Mapping[str, str]) -> str | None:
    """The process that started this rank and waits for it; None where there is none, or it cannot be seen.

    It is the nearest process above without the variables of this rank. Inside a container there may be none. A rank
    whose torchrun has ended already has one above that only adopted it, and that is no Python with torch: `GONE`.
    """
    if not any(name in environ for name in _OF_A_LAUNCHER):
        return None
    # A torchrun that is itself a rank of an agent has RANK too: only its own word for its ranks tells it from them.
    names = {*_OF_A_RANK, *_OF_A_LAUNCHER, _OF_TORCHRUN}
    ours = {f"{name}={environ[name]}".encode() for name in names if name in environ}
    fields = _stat(os.getpid())
    while fields is not None and (parent := int(fields[1])) > 0:
        if not ours <= _environment(parent):
            return GONE if _OF_TORCHRUN in environ and not _may_be_torchrun(parent) else name_process(parent)
        fields = _stat(parent)
    return None


def _stat(pid: int) -> list[str] | None:
    """State, parent, … of a process. "pid (name) state parent": a name may hold anything, brackets too."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _may_be_torchrun(pid: int) -> bool:
    """Whether a process has loaded torch, or, where that may not be read, is a Python. What is unknown may be it."""
    with contextlib.suppress(OSError), (_PROC / str(pid) / "maps").open("rb") as lines:
        return any(b"libtorch" in line for line in lines)
    try:
        program = (_PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0].rpartition(b"/")[2]
    except OSError:
        return True
    return not program or b"python" in program or b"torch" in program


def _environment(pid: int) -> set[bytes]:
    try:
        return set((_PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except OSError:  # another user's: a daemon of the scheduler
        return set()
