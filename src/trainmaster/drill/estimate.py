"""How long a drill still takes: its starts and steps that are left, by what those before took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmaster.drill.plan import BRANCHES, DAMAGE, LOOK_STEPS, STORAGE, Shape, Strike, past_next_save
from trainmaster.drill.record import Attempt

_STARTS = {**dict.fromkeys(("twice", "term", "saving", *STORAGE), 2), "stop": 0}  # of one strike; else 1


@dataclass(slots=True)
class Estimate:
    """Of one drill. Nothing is known before its first attempt has ended."""

    starts: int = 0  # that are left
    steps: int = 0
    _step_s: float = 0.0
    _spent_s: list[float] = field(default_factory=list)  # by each attempt, beside its steps

    def plan(self, strikes: Sequence[Strike], shape: Shape, *, undisturbed: int = 0) -> None:
        """What is left: these strikes, the struck run to its end, and so many undisturbed runs."""
        copies = sum(_STARTS.get(strike.name, 1) for strike in strikes if strike.name in BRANCHES)
        before = _save_before_damage(strikes, shape)
        self.starts = 1 + undisturbed + sum(_STARTS.get(strike.name, 1) for strike in strikes) + len(before)
        self.steps = (1 + undisturbed) * shape.steps + LOOK_STEPS * copies + sum(before)

    def take(self, done: Attempt) -> None:
        """An attempt that has ended."""
        lines = done.lives[0].lines if done.lives else ()
        if len(lines) > 1:
            self._step_s = (lines[-1].at - lines[0].at) / (len(lines) - 1)
        self._spent_s.append(max(0.0, done.ended - done.begun - self._step_s * len(lines)))
        self.starts, self.steps = max(0, self.starts - 1), max(0, self.steps - len(lines))

    def leave_out(self, starts: int) -> None:
        """Starts that are not needed, since there is nothing to be struck."""
        self.starts, self.steps = max(0, self.starts - starts), max(0, self.steps - LOOK_STEPS * starts)

    def __str__(self) -> str:
        if not self._spent_s or not self.starts:
            return ""
        left = self.starts * sum(self._spent_s) / len(self._spent_s) + self.steps * self._step_s
        return f" (about {left:.0f} s left in all)"


def _save_before_damage(strikes: Sequence[Strike], shape: Shape) -> list[int]:
    """Steps of the starts that save once more before damage: one for each where the run holds one checkpoint."""
    struck_at = max((strike.after for strike in strikes if strike.name not in BRANCHES), default=0)
    saved = [step for step in shape.saves if step < struck_at]
    if not saved or not (shape.keeps_one or len(saved) == 1):
        return []
    steps = past_next_save(shape, saved[-1])
    return [] if steps is None else [steps for strike in strikes if strike.name in DAMAGE]
