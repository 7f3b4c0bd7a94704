"""From the history of a job to its ledger: consecutive segments, each with one bin, that sum to the wall time exactly.

The ledger of a job begins when it was made and ends when the last thing it held was given back, or now. Stages are of
the server's clock. Events are of a node's: one outside the server's time of its attempt is moved to the nearer bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.core.money.goodput.attempt import NodeTime, Reading, Segment
from trainmaster.core.money.goodput.bins import OF_STAGE, PRODUCTIVE, Bin
from trainmaster.core.money.goodput.history import AttemptHistory, History, Mark, StageChange
from trainmaster.core.states import Stage

_ON_NODE = (Stage.STAGING, Stage.CHECKING, Stage.RUNNING)
_WORKED = frozenset({*PRODUCTIVE, Bin.REPEATED, Bin.SAVE_STALL})  # bins that only a reported step brings
_SKEW_US = 1_000_000  # two clocks that differ by less are not worth a note


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where the time of a job went. `segments` follow each other without a gap from `start` to `end`."""

    gpus: int
    start: int
    end: int
    segments: tuple[tuple[int, int, Bin, int], ...]  # from, to, bin, number of the attempt (0: none)
    readings: tuple[Reading, ...] = ()
    notes: tuple[str, ...] = ()
    steps: int = 0  # the highest step that was trained


def book(history: History, *, now: int) -> Ledger:
    """The ledger of a job as of a time."""
    changes = _in_order(history, now)
    attempts = {attempt.number: attempt for attempt in history.attempts}
    final = changes[-1].stage is None
    parts: list[tuple[int, int, Bin, int]] = []
    readings: list[Reading] = []
    notes: list[str] = []
    top, number = history.steps_before, 0
    at = 0
    while at < len(changes) - 1:
        following = next(
            (i for i in range(at + 1, len(changes)) if changes[i].stage in (Stage.QUEUED, None)), len(changes) - 1
        )
        if changes[at].stage is Stage.QUEUED:
            _add(parts, changes[at].at, changes[at + 1].at, Bin.QUEUED, 0)
            at += 1
            continue
        number += 1
        attempt = attempts.get(number, AttemptHistory(number=number))
        # The last entry is the end of the history, not a change of stage, unless the job is final.
        over = following == len(changes) - 1
        node = NodeTime(trainer=history.trainer, stall_us=history.stall_us, top=top)
        stretch = changes[at : following + 1]
        notes += _book_attempt(parts, stretch, attempt, node, goes_on=over and not final)
        _give_back(parts, attempt, stretch[-1].at, last=over)
        readings += node.readings
        top, at = node.top, following
    end = max((part[1] for part in parts), default=history.created)
    return Ledger(gpus=history.gpus, start=history.created, end=end, segments=tuple(parts), readings=tuple(readings),
                  notes=tuple(notes), steps=top)  # fmt: skip


def _in_order(history: History, now: int) -> list[StageChange]:
    """Changes of stage from the making of the job to now, or to its end; a clock that was set back does not count."""
    changes = [StageChange(history.created, Stage.QUEUED)]
    for change in history.stages:
        if changes[-1].stage is None:
            break
        at = max(change.at, changes[-1].at)
        if change.stage is not changes[-1].stage:
            changes.append(StageChange(at, change.stage))
    if changes[-1].stage is not None:
        changes.append(StageChange(max(now, changes[-1].at), changes[-1].stage))
    return changes


def _book_attempt(
    parts: list[tuple[int, int, Bin, int]],
    stretch: Sequence[StageChange],
    attempt: AttemptHistory,
    node: NodeTime,
    *,
    goes_on: bool,
) -> list[str]:
    """Segments of one attempt, from its first stage to the next queue or the end; what a reader must know of them."""
    there = [i for i in range(len(stretch) - 1) if stretch[i].stage in _ON_NODE]
    first = there[0] if there else len(stretch) - 1
    last = there[-1] + 1 if there else first
    for i in range(first):
        _add(parts, stretch[i].at, stretch[i + 1].at, OF_STAGE[_stage(stretch[i])], attempt.number)
    notes: list[str] = []
    if there:
        sent = next((c.at for c in stretch[first:last] if c.stage is not Stage.STAGING), stretch[last].at)
        notes = _book_node(
            attempt, node, start=stretch[first].at, sent=sent, end=stretch[last].at,
            goes_on=goes_on and last == len(stretch) - 1,
        )  # fmt: skip
        for low, high, bin_ in node.segments:
            _add(parts, low, high, bin_, attempt.number)
    for i in range(last, len(stretch) - 1):
        _add(parts, stretch[i].at, stretch[i + 1].at, OF_STAGE[_stage(stretch[i])], attempt.number)
    return notes


def _book_node(attempt: AttemptHistory, node: NodeTime, *, start: int, sent: int, end: int, goes_on: bool) -> list[str]:
    """The time on the node: being sent, waiting in the target's own queue, then what events say."""
    timed = sorted((mark for mark in attempt.marks if mark.at is not None), key=_time)
    off = [max(start - _time(mark), _time(mark) - end) for mark in timed]
    marks = [Mark(min(max(_time(mark), start), end), *mark[1:]) for mark in timed]
    signs = [marks[0].at] if marks else []
    signs += [min(max(attempt.started, start), end)] if attempt.started is not None else []
    begun = min((at for at in signs if at is not None), default=end)
    before: list[Segment] = [(start, min(sent, begun), Bin.STARTING), (sent, begun, Bin.QUEUED)]
    for low, high, bin_ in before:
        if high > low:
            node.segments.append((low, high, bin_))
    node.run(marks, start=max(start, begun), end=end, goes_on=goes_on)
    name, steps = f"attempt {attempt.number}", sum(m.at is None and m.phase == "STEP" for m in attempt.marks)
    notes = _explain_unknown(node, name, untimed_steps=steps)
    if untimed := len(attempt.marks) - len(timed):
        notes.append(f"{name}: {untimed} events without a time were left out")
    if furthest := max((by for by in off if by > _SKEW_US), default=0):
        outside = sum(by > _SKEW_US for by in off)
        notes.append(
            f"{name}: the node's clock differs from the server's: {outside} events lay up to {furthest / 1e6:.1f} s "
            "outside the attempt and were moved to its bounds"
        )
    return notes


def _explain_unknown(node: NodeTime, name: str, *, untimed_steps: int) -> list[str]:
    """Why time before the first step of a program that is not our trainer is unknown."""
    first = next((low for low, _, bin_ in node.segments if bin_ in _WORKED), None)
    unknown = sum(
        high - low for low, high, bin_ in node.segments if bin_ is Bin.UNKNOWN and (first is None or high <= first)
    )
    if node.trainer or not unknown:
        return []
    if first is None and untimed_steps:
        return [f"{name}: {unknown / 1e6:.1f} s are unknown: the program has reported {untimed_steps} steps, but no "
                "time of any; write the time into each line, as `ts`: time.time() in Python"]  # fmt: skip
    if first is None:
        return [f"{name}: {unknown / 1e6:.1f} s are unknown: the program has reported no step, and nothing else says "
                "whether it loads, compiles or trains"]  # fmt: skip
    return [f"{name}: {unknown / 1e6:.1f} s before its first step are unknown: a program of one's own does not say "
            "what it loads and compiles"]  # fmt: skip


def _give_back(parts: list[tuple[int, int, Bin, int]], attempt: AttemptHistory, until: int, *, last: bool) -> None:
    """End the attempt's time at its release. What follows is waiting for the next one, or no longer the job's."""
    released = attempt.released
    if released is not None and parts:
        kept: list[tuple[int, int, Bin, int]] = []
        while parts and parts[-1][3] == attempt.number and parts[-1][2] is Bin.IDLE and parts[-1][1] > released:
            low, high, bin_, number = parts.pop()
            if low < released:
                kept.append((low, released, bin_, number))
            if not last:
                kept.append((max(low, released), high, Bin.QUEUED, 0))
        parts += sorted(kept)
    if last and attempt.gone is not None:
        end = parts[-1][1] if parts else until
        _add(parts, end, attempt.gone, Bin.IDLE, attempt.number)


def _time(mark: Mark) -> int:
    return mark.at if mark.at is not None else 0


def _stage(change: StageChange) -> Stage:
    assert change.stage is not None, "the end of a job has no time of its own"
    return change.stage


def _add(parts: list[tuple[int, int, Bin, int]], low: int, high: int, bin_: Bin, number: int) -> None:
    if high > low:
        parts.append((low, high, bin_, number))
