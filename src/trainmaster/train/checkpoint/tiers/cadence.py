"""Save cadence of each tier: from the config, or derived from a loss bound and the times measured so far."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainmaster.core.config.checkpoint import CheckpointConfig
from trainmaster.train.checkpoint.tiers.loss_bound import (
    DISK,
    MEMORY,
    REMOTE,
    Bound,
    Tier,
    bound_of,
    derive,
    lost_steps,
    settle,
    steps_in,
)

_FIRST = 2  # with a bound to hold, the first save comes after this many steps: until then nothing is measured
_STEPS, _SAVES = 32, 8  # how many of the last ones count
_PAUSE = 3.0  # a step boundary later than this multiple of the median had other work before it
_ROOM = 2.0  # a bound without a limit in the config is stated with room: training waits for a save that would break it
_LONGER = 1.25  # intervals are made longer only if much longer ones do too: they should not change all the time


class Cadence:
    """Which tiers are due, and the bound that holds. Decisions are rank 0's: clocks differ."""

    def __init__(
        self,
        config: CheckpointConfig,
        tiers: Sequence[str],
        *,
        replicated: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tiers` that there are, fastest first; `replicated`: whether memory has a second node."""
        self._config, self._names, self._clock = config, list(tiers), clock
        self._limited = config.max_lost_steps is not None or config.max_lost_minutes is not None
        far = config.remote.every_steps if config.remote is not None else None
        every = {MEMORY: config.memory.every_steps, DISK: config.every_steps, REMOTE: far or config.every_steps}
        self._tiers = settle(
            [
                Tier(
                    name=name,
                    every_steps=_FIRST if self._limited else every[name],
                    busy_s=0.0,
                    replicated=name != MEMORY or replicated,
                )
                for name in tiers
            ]
        )
        self._begun = dict.fromkeys(tiers, 0)
        self._busy: dict[str, deque[float]] = {name: deque(maxlen=_SAVES) for name in tiers}
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._last: float | None = None
        self.bound: Bound | None = None

    @property
    def every_steps(self) -> int:
        """Steps between saves to the first tier."""
        return self._tiers[0].every_steps

    def start(self, step: int) -> None:
        """The run is at this step, and has it in every tier that it will ever have it in."""
        self._begun = dict.fromkeys(self._names, step)
        self._last = None

    def follow(self, other: Cadence) -> None:
        """Take over what another has measured, of the tiers that are left."""
        self._begun |= {name: step for name, step in other._begun.items() if name in self._begun}
        self._busy |= {name: times for name, times in other._busy.items() if name in self._busy}
        self._steps, self._last = other._steps, other._last

    def due(self, step: int) -> bool:
        return self._farthest(step) is not None

    def begin(self, step: int, *, all_tiers: bool) -> set[str]:
        """A save of this step begins; the tiers it goes to."""
        farthest = self._names[-1] if all_tiers else self._farthest(step)
        meant = self._names[: self._names.index(farthest or self._names[0]) + 1]
        self._begun |= dict.fromkeys(meant, step)
        return set(meant)

    def tick(self) -> None:
        """A step boundary."""
        now = self._clock()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    def took(self, tier: str, seconds: float) -> None:
        """How long a save kept this tier busy."""
        self._busy[tier].append(seconds)

    def reckon(self) -> tuple[list[Tier], Bound] | None:
        """Intervals and bound by what is measured now; None while there is too little. For `adopt` on every rank."""
        if len(self._steps) < 2 or not self._busy[self._names[0]]:
            return None
        step_s = statistics.median(self._steps)
        longest = max(self._steps)
        pause_s = longest - step_s if longest > _PAUSE * step_s else 0.0
        limit = self._limit(step_s, pause_s)
        room = 1.0 if self._limited else _ROOM
        measured = [
            replace(tier, busy_s=room * max(self._busy[tier.name])) for tier in self._tiers if self._busy[tier.name]
        ]
        if limit is not None:
            measured = _steadied(measured, derive(measured, step_s=step_s, limit_steps=limit), step_s, limit)
        waiting = [tier for tier in self._tiers if not self._busy[tier.name]]
        bound = bound_of(measured, step_s=step_s, pause_s=pause_s, limit_steps=limit)
        bound = replace(bound, unmeasured=tuple(tier.name for tier in waiting))
        # A tier that was not reached yet keeps its interval, but never a shorter one than the tier that feeds it.
        return settle(
            [*measured, *(replace(t, every_steps=max(t.every_steps, measured[-1].every_steps)) for t in waiting)]
        ), bound

    def adopt(self, reckoned: tuple[list[Tier], Bound]) -> None:
        """Go on with what rank 0 has reckoned."""
        self._tiers, self.bound = reckoned[0], reckoned[1]

    def _farthest(self, step: int) -> str | None:
        """The farthest tier that is due: a multiple of its interval has been passed since its last save began."""
        due = [t.name for t in self._tiers if step // t.every_steps > self._begun[t.name] // t.every_steps]
        return due[-1] if due else None

    def _limit(self, step_s: float, pause_s: float) -> int | None:
        steps, minutes = self._config.max_lost_steps, self._config.max_lost_minutes
        limits = [] if steps is None else [steps]
        if minutes is not None:
            limits.append(steps_in(minutes, step_s=step_s, pause_s=pause_s))
        return min(limits, default=None)


def _steadied(now: Sequence[Tier], wanted: Sequence[Tier], step_s: float, limit: int) -> list[Tier]:
    """The intervals of now where they still hold what the wanted ones hold, and are not much shorter."""
    worse = any(
        a > max(b, limit) for a, b in zip(lost_steps(settle(now), step_s), lost_steps(wanted, step_s), strict=True)
    )
    longer = any(b.every_steps > _LONGER * a.every_steps for a, b in zip(now, wanted, strict=True))
    return list(wanted) if worse or longer else list(now)
