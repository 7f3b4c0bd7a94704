"""One attempt on its node: events into consecutive pieces of time, each with a bin.

Events are put into the order of their times. Between two STEP events lies a reading: so many steps, of which shares
were spent waiting. Its time is cut up by what is recorded of it, and what is left is training. Cuts inside a reading
stand in a fixed order, not where they happened: nobody records that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainmaster.core.money.goodput.bins import BEGINS, LASTED, PARTS, Bin
from trainmaster.core.money.goodput.history import Mark

_US = 1_000_000
_PATIENCE = 3  # readings without a word before an attempt that goes on counts as stalled

_AGENT_BEGINS = (("PROJECT", "start"), ("PREFLIGHT", "start"))  # the first lines of an attempt, written by its agent

State = Bin | Literal["work", "first"]  # "work": between steps; "first": from the start of training to its first step
Piece = tuple[int, int, State]
Segment = tuple[int, int, Bin]
_OVERLAID: tuple[State, ...] = (Bin.STARTING, Bin.UNKNOWN, Bin.COMPILING, "first")  # where a stated duration says more


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How fast the GPUs computed in a stretch of training, against their datasheet."""

    at: int
    lasted: int
    mfu: float


@dataclass(slots=True, kw_only=True)
class NodeTime:
    """Cuts the time of one attempt on its node into segments. `top` is the highest step that was trained so far."""

    trainer: bool
    stall_us: int | None
    top: int
    segments: list[Segment] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    _state: State = Bin.STARTING
    _before_eval: State = Bin.STARTING
    _open: list[Piece] = field(default_factory=list)  # since the last step
    _step: int | None = None  # the last one, or that of the checkpoint
    _stalls: dict[int, int] = field(default_factory=dict)  # by step saved
    _due: list[int] = field(default_factory=list)  # the same steps, the next one last
    _slow: float = 0.0  # share of the present reading that a straggler cost
    _laid: list[Segment] = field(default_factory=list)  # durations that events state
    _pace: int | None = None  # of a step, from the readings behind the first
    _checked: int = 0  # when the last pre-flight began
    _last_reading: int = 0

    def run(self, marks: Sequence[Mark], *, start: int, end: int, goes_on: bool) -> None:
        """Add the segments from `start` to `end`. Marks have times within them and are in their order."""
        self._prepare(marks)
        at = start
        if not marks or (not self.trainer and (marks[0].phase, marks[0].event) not in _AGENT_BEGINS):
            self._state = Bin.UNKNOWN
        for mark in marks:
            if mark.at is None or self._repeats(mark):
                continue
            if mark.at > at:
                self._open.append((at, mark.at, self._state))
                at = mark.at
            self._take(mark)
        if end > at:
            self._open.append((at, end, self._state))
        self._close_tail(goes_on=goes_on)

    def _prepare(self, marks: Sequence[Mark]) -> None:
        """Read ahead what is told late: stalls when a save is committed, parts of a start when it is over."""
        paces, step = [], None
        for mark in marks:
            key = (mark.phase, mark.event)
            if key == ("CHECKPOINT", "saved") and (saved := _whole(mark.data, "step")) is not None:
                stall = _us(mark.data, "stall_s")
                self._stalls[saved] = max(stall, self._stalls.get(saved, 0))  # each tier tells the same stall
            elif key == ("STEP", "metrics"):
                now = _whole(mark.data, "step")
                if step is not None and now is not None and now > step and (pace := _us(mark.data, "step_s")):
                    paces.append(pace)
                step = now
            elif key == ("PREFLIGHT", "start"):
                self._checked = max(self._checked, mark.at or 0)
            self._laid += _stated(mark)
        self._due = sorted(self._stalls, reverse=True)
        self._pace = round(statistics.median(paces)) if paces else None

    def _repeats(self, mark: Mark) -> bool:
        """A STEP that was told twice."""
        if (mark.phase, mark.event) != ("STEP", "metrics") or self._state == "first":
            return False
        step = _whole(mark.data, "step")
        return step is not None and step == self._step and bool(self._last_reading)

    def _take(self, mark: Mark) -> None:
        match mark.phase, mark.event:
            case "STEP", "metrics":
                self._end_reading(_whole(mark.data, "step"), mark)
                self._state = "work"
            case "TRAINING", "start":
                # Training that begins again in the same attempt: what was between is a start.
                self._recast(Bin.STARTING if self.trainer else Bin.UNKNOWN)
                self._step = _whole(mark.data, "resumed_from") or 0
                self._state, self._last_reading = "first" if self.trainer else "work", 0
            case "TRAINING", "epoch_complete" if not self.trainer:
                self._end_reading(None, mark)
            case "TRAINING", "end":
                self._end_training(_whole(mark.data, "step"))
                self._state = Bin.IDLE if self.trainer else Bin.UNKNOWN
            case "PROJECT", "start" if not self.trainer and (mark.at or 0) >= self._checked:
                # Nothing tells when a program of one's own has started, unless checks are still before it.
                self._state = Bin.UNKNOWN
            case "PREFLIGHT", "end":
                self._state = Bin.STARTING if self.trainer else Bin.UNKNOWN
            case "PROJECT", "end":
                self._close_tail(goes_on=False)
                self._state = Bin.IDLE
            case "EVAL_TRAINING", "end":
                self._state = self._before_eval if self._state is Bin.EVALUATING else self._state
            case "WATCH", "rollback":
                self._recast(Bin.LOADING)
                self._step, self._state = _whole(mark.data, "to_step"), "work"
            case "WATCH", "straggler":
                self._slow = max(self._slow, _share(mark.data, "score"))
            case key if key in BEGINS:
                if key == ("EVAL_TRAINING", "start") and self._state is not Bin.EVALUATING:
                    self._before_eval = self._state
                self._state = BEGINS[key]

    def _recast(self, to: Bin) -> None:
        self._open = [(a, b, to if state in ("work", "first") else state) for a, b, state in self._open]

    def _end_reading(self, step: int | None, mark: Mark) -> None:
        first = any(state == "first" for *_, state in self._open)
        steps = step - self._step if step is not None and self._step is not None else None
        whole = _length(self._open, "work", "first")
        compiled = self._lay_over()
        if first and not compiled:
            self._split_first(steps)
        cuts = self._cut(step, steps, data=_share(mark.data, "data_share"), last=False)
        self._flush(cuts)
        spent = whole - sum(us for bin_, us in cuts if bin_ in (Bin.SAVE_STALL, Bin.STALLED))
        mfu = _number(mark.data, "mfu")
        if mfu is not None and 0 < mfu <= 1 and not first and spent > 0 and mark.at is not None:
            self.readings.append(Reading(at=mark.at, lasted=spent, mfu=mfu))
        if step is not None:
            self._step, self.top = step, max(self.top, step)
        self._last_reading, self._slow = max(whole, 1), 0.0

    def _split_first(self, steps: int | None) -> None:
        """Time up to the first step: the steps at their later pace, and compilation before them."""
        whole = _length(self._open, "first")
        if self._pace is not None and steps is not None and steps > 0:
            self._open = _repaint(self._open, "first", Bin.COMPILING, most=max(0, whole - steps * self._pace))
        else:
            # One step, whose pace is not known, is all start. Of several nobody can tell.
            self._open = _repaint(self._open, "first", Bin.COMPILING if steps == 1 else Bin.UNKNOWN, most=whole)

    def _end_training(self, step: int | None) -> None:
        """From the last step to the end of training: steps that were not told of, then the last save."""
        self._lay_over()
        steps = step - self._step if step is not None and self._step is not None else 0
        saved = step is not None and step in self._stalls
        cuts = self._cut(step, steps if steps > 0 else None, data=0.0, last=True)
        if self.trainer and saved:
            worked = max(0, steps) * (self._pace or 0)
            whole = _length(self._open, "work", "first")
            cuts = [(Bin.SAVE_STALL, max(0, whole - worked)), *(cut for cut in cuts if cut[0] is not Bin.SAVE_STALL)]
        self._flush(cuts)
        if step is not None:
            self.top = max(self.top, step)

    def _close_tail(self, *, goes_on: bool) -> None:
        """What follows the last step of an attempt that did not say its end."""
        self._lay_over()
        self._open = [(a, b, Bin.COMPILING if state == "first" else state) for a, b, state in self._open]
        silent = _length(self._open, "work")
        patience = _PATIENCE * self._last_reading or self.stall_us
        if goes_on and (patience is None or silent <= patience):
            self._flush([])  # the next step is under way
            return
        rest = Bin.STALLED if self.trainer or goes_on else Bin.UNKNOWN
        self._flush([(rest, silent)])

    def _cut(self, step: int | None, steps: int | None, *, data: float, last: bool) -> list[tuple[Bin, int]]:
        """What of a reading's time was not training, in the order in which it is cut off."""
        rest = _length(self._open, "work", "first")
        stall = self._find_stall(rest, steps)
        rest -= stall
        held = min(rest, self._take_stalls(step, last=last))
        rest -= held
        again = self._repeated(rest, step, steps)
        rest -= again
        waited = min(rest, round(rest * data))
        slow = min(rest - waited, round(rest * self._slow))
        return [(Bin.STALLED, stall), (Bin.SAVE_STALL, held), (Bin.REPEATED, again), (Bin.DATA_WAIT, waited),
                (Bin.STRAGGLER_WAIT, slow)]  # fmt: skip

    def _find_stall(self, whole: int, steps: int | None) -> int:
        """A silence longer than the job's stall limit, less the steps that were made in it."""
        silence = max((b - a for a, b, state in self._open if state in ("work", "first")), default=0)
        if self.stall_us is None or silence <= self.stall_us:
            return 0
        return min(whole, max(0, silence - (steps or 0) * (self._pace or 0)))

    def _take_stalls(self, step: int | None, *, last: bool) -> int:
        """Stalls of the saves that began in this reading: those of the step before it up to the one before its last."""
        if step is None or not self._stalls:
            return 0
        held = 0
        while self._due and (self._due[-1] < step or (last and self._due[-1] == step)):
            held += self._stalls.pop(self._due.pop())
        return held

    def _repeated(self, rest: int, step: int | None, steps: int | None) -> int:
        if step is None or self._step is None or steps is None:
            return 0
        if steps <= 0:
            return rest if step <= self.top else 0
        return rest * max(0, min(steps, self.top - self._step)) // steps

    def _lay_over(self) -> bool:
        """Put stated durations over the open pieces. True if a compilation is among them."""
        if not self._open or not any(state in _OVERLAID for *_, state in self._open):
            return False
        start, end = self._open[0][0], self._open[-1][1]
        compiled = False
        for low, high, bin_ in self._laid:
            if low < end and high > start:
                self._open = list(_lay(self._open, low, high, bin_))
                compiled = compiled or bin_ is Bin.COMPILING
        return compiled

    def _flush(self, cuts: Iterable[tuple[Bin, int]]) -> None:
        """Move the open pieces to the segments; those of work lose the cuts, from their start on."""
        left = [(bin_, us) for bin_, us in cuts if us > 0]
        for start, end, state in self._open:
            if state not in ("work", "first"):
                self._add(start, end, Bin(state))
                continue
            at = start
            while left and at < end:
                bin_, us = left.pop(0)
                taken = min(us, end - at)
                self._add(at, at + taken, bin_)
                at += taken
                if taken < us:
                    left.insert(0, (bin_, us - taken))
            self._add(at, end, Bin.TRAINING)
        self._open = []

    def _add(self, low: int, high: int, bin_: Bin) -> None:
        if high <= low:
            return
        if self.segments and self.segments[-1][2] is bin_ and self.segments[-1][1] == low:
            self.segments[-1] = (self.segments[-1][0], high, bin_)
        else:
            self.segments.append((low, high, bin_))


def _stated(mark: Mark) -> list[Segment]:
    """Intervals that an event states, up to its time."""
    if mark.at is None:
        return []
    named = LASTED.get((mark.phase, mark.event))
    parts = [(named[1], _us(mark.data, named[0]))] if named is not None else []
    listed = mark.data.get("parts")
    if isinstance(listed, Mapping):
        parts += [(PARTS[name], _us(listed, name)) for name in listed if name in PARTS]
    at, laid = mark.at, []
    for bin_, lasted in reversed(parts):
        if lasted:
            laid.append((at - lasted, at, bin_))
        at -= lasted
    return laid


def _lay(pieces: Iterable[Piece], low: int, high: int, bin_: Bin) -> Iterable[Piece]:
    for a, b, state in pieces:
        if state not in _OVERLAID or b <= low or a >= high:
            yield a, b, state
            continue
        if a < low:
            yield a, low, state
        yield max(a, low), min(b, high), bin_
        if b > high:
            yield high, b, state


def _repaint(pieces: Iterable[Piece], old: State, new: Bin, *, most: int) -> list[Piece]:
    """The first `most` microseconds of these pieces in another state."""
    painted: list[Piece] = []
    for a, b, state in pieces:
        taken = min(most, b - a) if state == old else 0
        most -= taken
        painted += [(a, a + taken, new)] if taken else []
        painted += [(a + taken, b, state)] if a + taken < b else []
    return painted


def _length(pieces: Iterable[Piece], *states: State) -> int:
    return sum(b - a for a, b, state in pieces if state in states)


def _number(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e18 and math.isfinite(value) else None


def _whole(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    return value if type(value) is int and 0 <= value < 2**53 else None


def _us(data: Mapping[str, Any], name: str) -> int:
    """Seconds of a field as microseconds; 0 where there are none, or they are no duration."""
    value = _number(data, name)
    return round(value * _US) if value is not None and 0 < value < 1e9 else 0


def _share(data: Mapping[str, Any], name: str) -> float:
    value = _number(data, name)
    return min(1.0, max(0.0, value)) if value is not None else 0.0
