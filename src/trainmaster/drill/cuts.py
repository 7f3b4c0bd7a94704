"""Steps of several optimizers, cut into steps of the run as the undisturbed run's were.

Which optimizer's steps are those of the run is seen from a process's first step on, and a process that resumed has
begun in the middle. So its lines are found among those that the run had, and are put together as those were.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainmaster.drill.witness_log import Life, Line, join

_LOOKED_AT = 64  # lines that are compared with those of a place
_OPTIMIZERS = 256  # lines in which the first of each optimizer is looked for: an epoch of one, and then another's

Lines = Mapping[int, Line]  # by step


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A process whose lines are those of the run's steps."""

    life: Life
    start: int  # the step that it went on from
    before: int = 0  # steps of optimizers in its first step that had been done before the save that it went on from
    own: Lines  # what the run had, of the first step only as much as this process did of it
    reference: Lines


def parts_of(line: Line) -> tuple[Line, ...]:
    return line.parts or (line,)


def cut(life: Life, own: Lines, reference: Lines, *, resumed: bool) -> Cut | None:
    """None: one optimizer stepped, or these lines are none that the run had."""
    several = any(line.parts for line in (*life.lines, *reference.values()))
    if not several or not life.parts or not reference:
        return None
    place = find(life.parts, own, reference) if resumed else (1, 0)
    if place is None:
        return None
    step, before = place
    ends = _ends(len(life.parts), step, before, reference)
    whole = [end for end in ends if end <= len(life.parts)] or [len(life.parts)]
    lines = [join(life.parts[a:b]) for a, b in itertools.pairwise([0, *whole])]
    saves = (replace(save, after=bisect.bisect(ends, save.parts)) for save in life.saves)
    done = len(parts_of(lines[0]))
    return Cut(
        life=replace(life, lines=tuple(lines), saves=tuple(saves)),
        start=step - 1,
        before=before,
        own=_from(own, step, before, done),
        reference=_from(reference, step, before, done),
    )


def stitch(line: Line, held: Line | None, before: int) -> Line:
    """The whole of a step of which the first ones were done before the save that this line went on from."""
    return join([*parts_of(held)[:before], *parts_of(line)]) if before and held is not None else line


def find(parts: Sequence[Line], own: Lines, reference: Lines) -> tuple[int, int] | None:
    """The step, and the place in it, that these lines begin at; where several are like it, the one most like it.

    Of one optimizer's state that was not loaded the others' tell.
    """
    seen: dict[int, int] = {}
    for at, part in enumerate(parts[:_OPTIMIZERS]):
        seen.setdefault(part.optimizer, at)
    for what in ("weights", "state"):
        found: list[tuple[int, int, int, tuple[int, int]]] = []
        for rank, lines in ((1, own), (0, reference)):
            flat = [(step, at, part) for step in sorted(lines) for at, part in enumerate(parts_of(lines[step]))]
            for first in seen.values():
                wanted = getattr(parts[first], what)
                places = [
                    place - first
                    for place, (_, _, part) in enumerate(flat)
                    if wanted is not None and place >= first and getattr(part, what) == wanted
                ]
                for place in places:
                    there = [part for _, _, part in flat[place : place + _LOOKED_AT]]
                    found.append((_alike(parts, there), rank, place, flat[place][:2]))
        if found:
            return max(found)[-1]
    return None


def _alike(parts: Sequence[Line], there: Sequence[Line]) -> int:
    pairs = list(zip(parts, there, strict=False))
    near = sum((one.rates == other.rates) + (one.random == other.random) for one, other in pairs[:1])
    return near + sum(2 * (one.weights == other.weights) + 2 * (one.state == other.state) for one, other in pairs)


def _ends(many: int, step: int, before: int, reference: Lines) -> list[int]:
    """Where each step ends, in so many lines; past the undisturbed run's end steps are like its last one."""
    ends: list[int] = []
    last = max(reference)
    while not ends or ends[-1] < many:
        size = len(parts_of(reference[min(step, last)])) - before
        ends.append((ends[-1] if ends else 0) + max(1, size))
        step, before = step + 1, 0
    return ends


def _from(lines: Lines, step: int, before: int, done: int) -> Lines:
    """With so much of this step as a process did that began in it, or was killed in it; else without the step."""
    if step not in lines or (not before and len(parts_of(lines[step])) == done):
        return lines
    some = parts_of(lines[step])[before : before + done]
    rest = {number: line for number, line in lines.items() if number != step}
    return {**rest, step: join(some)} if len(some) == done else rest
