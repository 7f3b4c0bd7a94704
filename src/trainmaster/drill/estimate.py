"""How long a drill still takes: its starts and steps that are left, by what those before took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmaster.drill.plan import BRANCHES, LOOK_STEPS, STORAGE, Strike
from trainmaster.drill.record import Attempt

_STARTS = {**dict.fromkeys(("twice", "term", "saving", *STORAGE), 2), "stop": 0}  # of one strike; else 1


@dataclass(slots=True)
class Estimate:
    """Of one drill. Nothing is known before its first attempt has ended."""

    starts: int = 0  # that are left
    steps: int = 0
    _step_s: float = 0.0
    _spent_s: list[float] = field(default_factory=list)  # by each attempt, beside its steps

    def plan(self, strikes: Sequence[Strike], steps: int) -> None:
        """What is left: these strikes, and the struck run to its end. `steps` of the whole run."""
        copies = sum(_STARTS.get(strike.name, 1) for strike in strikes if strike.name in BRANCHES)
        self.starts = 1 + sum(_STARTS.get(strike.name, 1) for strike in strikes)
        self.steps = steps + LOOK_STEPS * copies

    def take(self, done: Attempt) -> None:
        """An attempt that has ended."""
        lines = done.lives[0].lines if done.lives else ()
        if len(lines) > 1:
            self._step_s = (lines[-1].at - lines[0].at) / (len(lines) - 1)
        self._spent_s.append(max(0.0, done.ended - done.begun - self._step_s * len(lines)))
        self.starts, self.steps = max(0, self.starts - 1), max(0, self.steps - len(lines))

    def __str__(self) -> str:
        if not self._spent_s or not self.starts:
            return ""
        left = self.starts * sum(self._spent_s) / len(self._spent_s) + self.steps * self._step_s
        return f" (about {left:.0f} s left in all)"
