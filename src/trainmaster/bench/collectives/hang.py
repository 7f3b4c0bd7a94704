"""Hang attribution: the rank that blocks the others, from the last known progress of each. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.bench.collectives.progress import Progress
from trainmaster.bench.collectives.result import Lost
from trainmaster.bench.collectives.sweep import Point
from trainmaster.train.watch import hang_ladder
from trainmaster.train.watch.hang_ladder import Evidence

# Signals by which a rank ends because another one is gone: the backend aborts it.
_ABORTED_BY_PEER = frozenset({signal.SIGABRT})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """Known state of one rank."""

    rank: int
    host: str
    pid: int | None
    progress: Progress
    exit_code: int | None = None  # None: still alive as far as is known
    state: str | None = None  # the letter of /proc/PID/stat; None: not readable
    error: str | None = None  # its message before it failed
    failed_at: float | None = None
    done: bool = False
    silent_s: float | None = None  # time without an expected heartbeat; None: heartbeats arrive


def find_lost_ranks(views: Sequence[RankView], points: Sequence[Point], *, waited_s: float) -> list[Lost]:
    """The ranks that keep the others waiting, and the evidence for each; the surest evidence first.

    1. ended without an error message (killed, or too early), stopped, or silent. 2. the first that failed by itself.
    3. alive, but furthest behind. 4. none: every rank entered the collective and none returned.
    """
    left = [view for view in views if not view.done]
    if not left:
        return []
    # What failed later may have failed because the first one left.
    failed = [view for view in left if view.error is not None or view.exit_code is not None]
    first = min(failed, key=lambda view: view.failed_at or float("inf"), default=None)
    least, furthest = (pick(view.progress.position for view in left) for pick in (min, max))
    kinds = [
        Evidence(judge=_ended_or_halted, may_be_all=True),
        Evidence(judge=lambda view: "failed" if view is first else None, may_be_all=True),
        Evidence(judge=lambda view: "is behind" if view.progress.position == least != furthest else None),
    ]
    suspects = hang_ladder.climb(left, kinds)
    if suspects:
        return [_lost(view, points, waited_s=waited_s) for view, _ in sorted(suspects, key=lambda item: item[0].rank)]
    where = _where(left[0], points)
    hosts = ", ".join(dict.fromkeys(view.host for view in left))
    return [
        Lost(
            rank=None, host=hosts, pid=None, state="hung", collective=where.collective if where else None,
            size_bytes=where.size_bytes if where else None, seq=where.seq if where else None,
            reason=f"all {len(left)} ranks {_doing(left[0], points)} and none came back within {waited_s:.0f} s; "
            f"{hang_ladder.ALL_PRESENT}",
        )
    ]  # fmt: skip


def _ended_or_halted(view: RankView) -> str | None:
    if view.exit_code is not None:
        return "ended" if _vanished(view) else None
    return hang_ladder.stopped(view.state) or hang_ladder.silent(view.silent_s)


def _vanished(view: RankView) -> bool:
    if view.exit_code is None or view.error is not None:
        return False
    return not (view.exit_code < 0 and -view.exit_code in _ABORTED_BY_PEER)


def _lost(view: RankView, points: Sequence[Point], *, waited_s: float | None = None) -> Lost:
    where = _where(view, points)
    state, reason = _why(view, waited_s)
    return Lost(
        rank=view.rank,
        host=view.host,
        pid=view.pid,
        state=state,
        reason=f"rank {view.rank} on {view.host} (pid {view.pid}) {reason}; it {_doing(view, points)}",
        collective=where.collective if where else None,
        size_bytes=where.size_bytes if where else None,
        seq=where.seq if where else None,
    )


def _why(view: RankView, waited_s: float | None) -> tuple[str, str]:
    if view.error is not None:
        return "failed", f"failed: {view.error.splitlines()[0][:300]}"
    if view.exit_code is not None:
        if view.exit_code < 0:
            return "killed", f"was killed by {_signal(-view.exit_code)}"
        return "failed", f"ended with exit code {view.exit_code} before it was done"
    if why := hang_ladder.stopped(view.state):
        return "stopped", why
    if why := hang_ladder.silent(view.silent_s):
        return "silent", why
    return "behind", f"kept the others waiting for {waited_s or 0:.0f} s{hang_ladder.in_kernel(view.state)}"


def _doing(view: RankView, points: Sequence[Point]) -> str:
    where = _where(view, points)
    if where is None:
        return "had not met the others yet" if view.progress.seq < 0 else "was done"
    inside = "had entered" if view.progress.inside else "had left"
    return f"{inside} round {view.progress.op} of {where}"


def _where(view: RankView, points: Sequence[Point]) -> Point | None:
    return points[view.progress.seq] if 0 <= view.progress.seq < len(points) else None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
