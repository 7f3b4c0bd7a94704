"""Hang attribution: which ranks keep the others waiting in a collective. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from trainmaster.train.watch import hang_ladder
from trainmaster.train.watch.flight_recorder import Collective, Trace
from trainmaster.train.watch.hang_ladder import Evidence

MARK = "hang:"  # first word of the line; agent/diagnose.py finds it by this
_NAMED = 4  # ranks named in the line; of more only the number is given
_ACTIVITIES = {"data": "waits for data", "save": "is saving", "load": "is loading", "eval": "is evaluating"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A rank and the process it runs in."""

    rank: int
    node: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, {self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Status that a rank publishes once a second."""

    beats: int
    doing: str  # train, data, eval, save, load
    step: int
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """A rank as seen from another one."""

    process: RankProcess
    status: RankStatus | None  # None: it has never published one
    silent_s: float = 0.0  # since its status last changed; 0: it changes
    state: str | None = None  # letter of /proc/PID/stat; "gone"; None: on another machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The missing ranks and the line that names them. No rank: all are present, and the network or a GPU hangs."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    collective: str
    line: str


def attribute(views: Sequence[RankView], mine: Trace, *, step: int, now: float) -> Hang:
    """The ranks that are missing from the collective that `mine` waits in."""
    where = mine.waiting[0] if mine.waiting else None
    waited_s = now - where.since if where else 0.0
    what = f"{where} in step {step + 1}" if where else f"step {step + 1}"
    kinds = [Evidence(judge=_halted), Evidence(judge=_silent), Evidence(judge=lambda view: _behind(view, where))]
    missing = hang_ladder.climb(views, kinds)
    if missing:
        names = "; ".join(f"{view.process} {why}{_last_seen(view, where)}" for view, why in missing[:_NAMED])
        more = f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        others = len(views) - len(missing)
        line = f"{MARK} {names}{more}; {others} of {len(views)} ranks wait in {what} since {waited_s:.0f} s"
    else:
        line = (
            f"{MARK} all {len(views)} ranks are in {what} since {waited_s:.0f} s and none comes out; "
            f"{hang_ladder.ALL_PRESENT}"
        )
    return Hang(
        ranks=tuple(view.process.rank for view, _ in missing),
        nodes=tuple(dict.fromkeys(view.process.node for view, _ in missing)),
        collective=str(where or ""),
        line=line,
    )


def _halted(view: RankView) -> str | None:
    return hang_ladder.stopped(view.state) or ("is gone" if view.state in ("gone", "Z", "X") else None)


def _silent(view: RankView) -> str | None:
    if view.status is None:
        return "has never reported: it is stopped, dead or cut off"
    return hang_ladder.silent(view.silent_s)


def _behind(view: RankView, where: Collective | None) -> str | None:
    if view.status is None or where is None:
        return None
    # In a group of some ranks only, a rank that has begun nothing is no member.
    no_member = -1 if ":default_pg." in where.group else where.seq
    known = next((begun.seq for begun in view.status.trace.begun if begun.group == where.group), no_member)
    if known >= where.seq:
        return None
    activity = _ACTIVITIES.get(view.status.doing, "computes")
    return f"is alive but has not entered it: it {activity}{hang_ladder.in_kernel(view.state)}"


def _last_seen(view: RankView, where: Collective | None) -> str:
    """Clause with the rank's newest collective, unless it is the one that the others wait in."""
    if view.status is None or not view.status.trace.begun:
        return ""
    last = max(view.status.trace.begun, key=lambda begun: begun.since)
    if where is not None and (last.group, last.seq) == (where.group, where.seq):
        return ", having entered it"
    return f", last seen in {last}"


def render_hang(result: Hang) -> str:
    return json.dumps(asdict(result), separators=(",", ":"))


def parse_hang(text: str | bytes) -> Hang | None:
    """A verdict from its text; None where it cannot be read."""
    try:
        raw = json.loads(text)
        return Hang(
            ranks=tuple(raw["ranks"]), nodes=tuple(raw["nodes"]), collective=raw["collective"], line=raw["line"]
        )
    except (ValueError, KeyError, TypeError):
        return None


def render(status: RankStatus) -> str:
    """A status as the text that is kept in the store."""
    return json.dumps(asdict(status), separators=(",", ":"))


def parse(text: str | bytes) -> RankStatus | None:
    """A status from its text; None if it cannot be read."""
    try:
        raw = json.loads(text)
        trace = Trace(**{name: tuple(map(_collective, raw["trace"][name])) for name in ("waiting", "begun")})
        return RankStatus(beats=int(raw["beats"]), doing=str(raw["doing"]), step=int(raw["step"]), trace=trace)
    except (ValueError, KeyError, TypeError):
        return None


def _collective(raw: Mapping[str, object]) -> Collective:
    return Collective(**raw)  # type: ignore[arg-type]
