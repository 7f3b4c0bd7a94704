"""Who keeps the others waiting: from what each rank waits in and when it was last heard of. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from trainmaster.train.watch.flight_recorder import Collective, Trace

MARK = "hang:"  # how the line begins; the agent finds it by this word (agent/diagnose.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """A rank and where it runs."""

    rank: int
    node: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, {self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a rank says of itself once a second."""

    beats: int
    doing: str  # train, data, eval, save, load
    step: int
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A rank as another one sees it."""

    who: Who
    pulse: Pulse | None  # None: it has never spoken
    silent_s: float = 0.0  # since its pulse last changed; 0: it speaks
    state: str | None = None  # letter of /proc/PID/stat; "gone"; None: on another machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Who is missing, and the line that says so. No rank: all are there, and what lies between them hangs."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    collective: str
    line: str


def find(views: Sequence[View], mine: Trace, *, step: int, now: float) -> Blame:
    """Who does not come along with what `mine` waits in.

    The surest evidence first: gone or stopped processes, then silent ones, then those that live and are elsewhere, then
    nobody.
    """
    where = mine.waiting[0] if mine.waiting else None
    waited_s = now - where.since if where else 0.0
    what = f"{where} in step {step + 1}" if where else f"step {step + 1}"
    for judge in (_halted, _silent, lambda view: _behind(view, where)):
        found = [(view, why) for view in views if (why := judge(view))]
        if found and len(found) < len(views):
            names = "; ".join(f"{view.who} {why}{_last(view, where)}" for view, why in found[:4])
            more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
            others = len(views) - len(found)
            return Blame(
                ranks=tuple(view.who.rank for view, _ in found),
                nodes=tuple(dict.fromkeys(view.who.node for view, _ in found)),
                collective=str(where or ""),
                line=f"{MARK} {names}{more}; {others} of {len(views)} ranks wait in {what} since {waited_s:.0f} s",
            )
    return Blame(
        ranks=(),
        nodes=(),
        collective=str(where or ""),
        line=f"{MARK} all {len(views)} ranks are in {what} since {waited_s:.0f} s and none comes out; no process is "
        "stopped or gone, so the network or a GPU hangs",
    )


def _halted(view: View) -> str | None:
    if view.state in ("T", "t"):
        return "is stopped (SIGSTOP, or a debugger holds it)"
    return "is gone" if view.state in ("gone", "Z", "X") else None


def _silent(view: View) -> str | None:
    if view.pulse is None:
        return "is not heard of: stopped, dead or cut off"
    return f"is silent since {view.silent_s:.0f} s: stopped, dead or cut off" if view.silent_s else None


def _behind(view: View, where: Collective | None) -> str | None:
    if view.pulse is None or where is None:
        return None
    # Of a group of some ranks only, who has begun nothing in it is no member.
    stranger = -1 if ":default_pg." in where.group else where.seq
    known = next((one.seq for one in view.pulse.trace.begun if one.group == where.group), stranger)
    if known >= where.seq:
        return None
    doing = {"data": "waits for data", "save": "is saving", "load": "is loading", "eval": "is evaluating"}
    slow = "; its process waits in the kernel for a device (state D)" if view.state == "D" else ""
    return f"lives but has not come: it {doing.get(view.pulse.doing, 'computes')}{slow}"


def _last(view: View, where: Collective | None) -> str:
    """Where it was last seen, as far as that is not what the others wait in."""
    if view.pulse is None or not view.pulse.trace.begun:
        return ""
    last = max(view.pulse.trace.begun, key=lambda one: one.since)
    if where is not None and (last.group, last.seq) == (where.group, where.seq):
        return ", having entered it"
    return f", last seen in {last}"


def render(pulse: Pulse) -> str:
    return json.dumps(asdict(pulse), separators=(",", ":"))


def parse(text: str | bytes) -> Pulse | None:
    """A pulse from its text; one that cannot be read is as good as none."""
    try:
        raw = json.loads(text)
        trace = Trace(**{name: tuple(map(_collective, raw["trace"][name])) for name in ("waiting", "begun")})
        return Pulse(beats=int(raw["beats"]), doing=str(raw["doing"]), step=int(raw["step"]), trace=trace)
    except (ValueError, KeyError, TypeError):
        return None


def _collective(raw: Mapping[str, object]) -> Collective:
    return Collective(**raw)  # type: ignore[arg-type]
