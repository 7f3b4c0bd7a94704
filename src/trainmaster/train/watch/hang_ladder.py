"""Ladder of evidence for hang attribution, shared by the trainer (hang.py) and the collectives benchmark.

Evidence is tried from the surest to the least sure: a process that is gone or stopped, one that stopped reporting, one
that is alive but behind. The first kind that applies to any rank names the ranks that keep the others waiting. If none
applies, all ranks are in the same collective, and the network or a GPU hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

V = TypeVar("V")

ALL_PRESENT = "no process is stopped or gone, so the network or a GPU hangs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Generic[V]):
    """One kind of evidence. `judge` returns what is wrong with a rank, or None."""

    judge: Callable[[V], str | None]
    may_be_all: bool = False  # False: what applies to every rank tells none from the others, and is no evidence


def climb(views: Sequence[V], kinds: Sequence[Evidence[V]]) -> list[tuple[V, str]]:
    """The ranks that the first applicable kind of evidence names, each with its evidence; empty if none applies."""
    for kind in kinds:
        named = [(view, why) for view in views if (why := kind.judge(view))]
        if named and (kind.may_be_all or len(named) < len(views)):
            return named
    return []


def stopped(state: str | None) -> str | None:
    """Evidence from a process state: stopped by a signal or a debugger."""
    return "is stopped (SIGSTOP, or a debugger holds it)" if state in ("T", "t") else None


def silent(seconds: float | None) -> str | None:
    """Evidence from the time since the last report of a rank; None or 0: it reports."""
    return f"has not reported for {seconds:.0f} s: it is stopped, dead or cut off" if seconds else None


def in_kernel(state: str | None) -> str:
    """Clause to append for a process that the kernel holds; empty for any other."""
    return "; its process waits in the kernel for a device (state D)" if state == "D" else ""


def read_state(pid: int) -> str | None:
    """State letter of a process on this machine (R, S, D, T, Z); "gone" if there is none; None if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"
    except (OSError, IndexError):
        return None
