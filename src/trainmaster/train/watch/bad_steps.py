"""Bad steps: whether a step may update the weights, from its loss, gradient norm and the good steps before it. Pure.

Loss and norm are of the whole batch and equal on every rank, so all ranks decide alike without communication. The
limits of a step are known before it begins (`limits`): the GPU compares its results with them and skips the update
without waiting for the host.
"""

from __future__ import annotations

import math
import statistics
import struct
from dataclasses import dataclass, replace
from typing import Literal

from trainmaster.core.config.watch import WatchConfig
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.plan import EXIT_REASONS
from trainmaster.core.schema import field
from trainmaster.core.states import Reason

# The deviation of a very quiet history is taken for at least this share of its median: in the flat end of a run a
# hair's breadth would otherwise count as a spike.
_LEAST_DEVIATION = 0.05
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


class Diverged(TrainmasterError):
    """Bad steps came back after every rollback that is allowed; the same run would end so again."""

    exit_code = next(code for code, reason in EXIT_REASONS.items() if reason is Reason.DIVERGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The newest healthy steps, oldest first, and the row of sick ones under way. Part of the run's saved state."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    sick_steps: int = 0  # in a row, up to now
    sick_from: int | None = None  # first sample of that row


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest loss and norm a step may have; infinite where none is set. NaN and infinity are never allowed."""

    loss: float = math.inf
    norm: float = math.inf

    def why_sick(self, loss: float, norm: float) -> str | None:
        """What is wrong with a step, or None."""
        for name, value, limit in (("loss", loss, self.loss), ("gradient norm", norm, self.norm)):
            if not math.isfinite(value):
                return f"{name} is {value}"
            if value > limit:
                return f"{name} {value:.4g} is a spike: at most {limit:.4g} fits the steps before it"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision on a step and its cause; `history` is for the next step."""

    act: Literal["move", "skip", "roll back"]
    why: str | None
    history: History


def limits(history: History, config: WatchConfig) -> Limits:
    """The bounds of the next step."""
    if len(history.losses) < config.spike_history:
        return Limits()
    return Limits(
        loss=_limit(history.losses, config.loss_spike),
        norm=_limit(history.norms, config.grad_spike),
    )


def decide(
    history: History, loss: float, norm: float, *, cursor: int, config: WatchConfig, bounds: Limits | None = None
) -> Decision:
    """Move, skip, or go back. `cursor` is the step's first sample; `bounds` those it was computed under."""
    why = (bounds if bounds is not None else limits(history, config)).why_sick(loss, norm)
    if why is None:
        keep = config.spike_history
        healthy = History(losses=(*history.losses, loss)[-keep:], norms=(*history.norms, norm)[-keep:])
        return Decision(act="move", why=None, history=healthy)
    row = replace(
        history,
        sick_steps=history.sick_steps + 1,
        sick_from=cursor if history.sick_from is None else history.sick_from,
    )
    return Decision(act="roll back" if row.sick_steps >= config.max_skipped else "skip", why=why, history=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Samples that are passed over, `end` not among them."""

    first: int = field(ge=0, doc="the first of them")
    end: int = field(ge=0, doc="the one after the last")


def pass_over(cursor: int, samples: int, ranges: tuple[Range, ...]) -> int:
    """First cursor, from `cursor` on, at which a batch of `samples` touches no excluded range."""
    for excluded in sorted(ranges, key=lambda item: item.first):
        if cursor < excluded.end and excluded.first < cursor + samples:
            cursor = excluded.end
    return cursor


def _limit(values: tuple[float, ...], deviations: float | None) -> float:
    if deviations is None:
        return math.inf
    middle = statistics.median(values)
    spread = _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)
    return _as_float32(middle + deviations * max(spread, _LEAST_DEVIATION * abs(middle)))


def _as_float32(value: float) -> float:
    """Round to float32: host and device must agree on a loss at the limit."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf
