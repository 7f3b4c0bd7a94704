"""`search:` of a spec: what is varied, how trials are proposed, which are stopped early.

search:
  metric: loss
  parameters:
    train.optimizer.lr: {float: [0.0001, 0.01], log: true}
    train.batch_sequences: {int: [8, 64], step: 8}
    size: [small, large]
  trials: 40
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.schema import build, field
from trainmaster.core.secret.shapes import recognise

MOST_TRIALS = 1000
EVAL = "eval/"  # before the name of a metric of evaluations, as on the page that compares runs
_MOST_PARAMETERS, _MOST_CHOICES = 32, 100
_MOST_INT, _MOST_FLOAT = 10**15, 1e300  # whole numbers that a float holds exactly; a difference of floats is finite
_MOST_STEPS = 10**20  # in a range; the remainder of Decimal has 28 digits
_SPACES = "write a list of choices, {int: [1, 8]} or {float: [0.0001, 0.01], log: true}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]

    def probes(self) -> tuple[Any, ...]:
        return self.values

    def grid(self) -> tuple[Any, ...] | None:
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class IntRange:
    """A whole number, both ends included."""

    low: int = field(ge=-_MOST_INT, le=_MOST_INT, doc="least value")
    high: int = field(ge=-_MOST_INT, le=_MOST_INT, doc="greatest value")
    step: int | None = field(default=None, ge=1, le=_MOST_INT, doc="distance of two values; not stated: 1")
    log: bool = field(default=False, doc="small values are tried as often as great ones")

    def faults(self) -> Iterator[Fault]:
        yield from _range_faults(self.low, self.high, self.step, log=self.log)

    def probes(self) -> tuple[Any, ...]:
        return self.low, self.high

    def grid(self) -> tuple[Any, ...] | None:
        step = self.step or 1
        if self.log or (self.high - self.low) // step >= MOST_TRIALS:
            return None
        return tuple(range(self.low, self.high + 1, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatRange:
    """A number, both ends included."""

    low: float = field(ge=-_MOST_FLOAT, le=_MOST_FLOAT, doc="least value")
    high: float = field(ge=-_MOST_FLOAT, le=_MOST_FLOAT, doc="greatest value")
    step: float | None = field(default=None, gt=0, le=_MOST_FLOAT, doc="distance of two values; not stated: any value")
    log: bool = field(default=False, doc="small values are tried as often as great ones")

    def faults(self) -> Iterator[Fault]:
        yield from _range_faults(self.low, self.high, self.step, log=self.log)

    def probes(self) -> tuple[Any, ...]:
        return self.low, self.high

    def grid(self) -> tuple[Any, ...] | None:
        if self.step is None:
            return None
        low, high, step = (Decimal(repr(value)) for value in (self.low, self.high, self.step))
        count = int((high - low) / step) + 1
        return tuple(float(low + step * number) for number in range(count)) if count <= MOST_TRIALS else None


Space = Choice | IntRange | FloatRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A set of runs whose trials are proposed one after the other, from the results of those before."""

    parameters: Mapping[str, Any] = field(
        doc="field of the spec, or variable, and what it may be: a list of choices, `{int: [low, high]}` or "
        "`{float: [low, high]}` with `log: true` or `step`",
        example="{train.optimizer.lr: {float: [0.0001, 0.01], log: true}}",
    )
    trials: int | None = field(
        default=None,
        ge=1,
        le=MOST_TRIALS,
        default_text="required; with grid: every combination",
        doc="runs in all, at most 1000",
    )
    metric: str = field(
        default="loss",
        pattern=r"[A-Za-z_][A-Za-z0-9_./:@-]{0,99}",
        allowed="a name of letters, digits and _./:@-",
        example="loss",
        doc="figure of the run's STEP events, or `eval/NAME` of its EVAL_MODEL events; the last one is the result",
    )
    goal: Literal["min", "max"] = field(default="min", doc="which value of the metric is the best")
    sampler: Literal["tpe", "random", "grid"] = field(
        default="tpe", doc="sampler of Optuna that proposes the trials: TPESampler, RandomSampler or GridSampler"
    )
    seed: int = field(default=0, ge=0, le=2**32 - 1, doc="of the sampler")
    pruner: Literal["none", "median", "asha"] = field(
        default="none", doc="pruner of Optuna that stops runs early: MedianPruner or SuccessiveHalvingPruner"
    )
    startup_trials: int = field(
        default=10, ge=1, le=MOST_TRIALS, doc="results before tpe uses them, and completed runs before median stops one"
    )
    warmup_steps: int = field(
        default=1, ge=1, le=10**9, doc="no run is stopped before this step; with asha the first rung"
    )
    reduction: int = field(default=4, ge=2, le=100, doc="with asha: one in so many goes on from a rung to the next")

    def faults(self) -> Iterator[Fault]:
        if recognise(self.metric) is not None:
            yield Fault(path="metric", message="looks like a secret; write the name of a figure, as loss")
        if not self.parameters:
            yield Fault(path="parameters", message=f"name at least one: {{train.optimizer.lr: …}}; {_SPACES}")
        if len(self.parameters) > _MOST_PARAMETERS:
            yield Fault(path="parameters", message=f"are {len(self.parameters)}; at most {_MOST_PARAMETERS} are varied")
        sound = True
        for key, value in self.parameters.items():
            try:
                parse_space(value, path=f"parameters.{key}")
            except SpecError as error:
                sound = False
                yield from error.faults
        if sound and sum(len(space.probes()) for space in self.spaces.values()) > MOST_TRIALS:
            yield Fault(path="parameters", message=f"have more than {MOST_TRIALS:,} choices in all")
        elif sound and self.sampler == "grid":
            yield from self._grid_faults()
        if self.sampler != "grid" and self.trials is None:
            yield Fault(path="trials", message="missing; write how many runs to make: trials: 40")

    def _grid_faults(self) -> Iterator[Fault]:
        spaces = self.spaces
        for key, space in spaces.items():
            if space.grid() is None:
                message = f"is no grid of at most {MOST_TRIALS:,} values: write choices, or a range with a step, no log"
                yield Fault(path=f"parameters.{key}", message=message)
                return
        if (count := self.grid_size) > MOST_TRIALS:
            yield Fault(path="parameters", message=f"give {count:,} combinations; a grid has at most {MOST_TRIALS:,}")
        elif self.trials is not None and self.trials > count:
            yield Fault(path="trials", message=f"the grid has {count} combinations; write at most {count}, or nothing")

    @property
    def spaces(self) -> dict[str, Space]:
        return {key: parse_space(value, path=key) for key, value in self.parameters.items()}

    @property
    def grid_size(self) -> int:
        return math.prod(len(space.grid() or ()) for space in self.spaces.values())

    @property
    def total(self) -> int:
        """Trials in all."""
        return self.trials if self.trials is not None else self.grid_size

    @property
    def place(self) -> tuple[str, str]:
        """Phase of the events that have the metric, and its name there."""
        name = self.metric.removeprefix(EVAL)
        return ("STEP" if name == self.metric else "EVAL_MODEL"), name


def parse_space(value: object, *, path: str) -> Space:
    """What a parameter may be; SpecError where it is none of the three."""
    if isinstance(value, list):
        return _parse_choice(value, path)
    if isinstance(value, Mapping) and len(kind := [word for word in ("int", "float") if word in value]) == 1:
        ends = value[kind[0]]
        if not isinstance(ends, list) or len(ends) != 2:
            raise SpecError([Fault(path=f"{path}.{kind[0]}", message="write the least and the greatest value: [1, 8]")])
        if reserved := [word for word in ("low", "high") if word in value]:
            raise SpecError([Fault(path=f"{path}.{reserved[0]}", message=f"unknown field; {_SPACES}")])
        fields = {**{key: item for key, item in value.items() if key != kind[0]}, "low": ends[0], "high": ends[1]}
        return build(IntRange, fields, path=path) if kind[0] == "int" else build(FloatRange, fields, path=path)
    raise SpecError([Fault(path=path, message=f"is no space of values; {_SPACES}")])


def _parse_choice(values: list[Any], path: str) -> Choice:
    if not 1 <= len(values) <= _MOST_CHOICES:
        raise SpecError([Fault(path=path, message=f"has {len(values)} choices; write 1 to {_MOST_CHOICES}")])
    try:
        texts = [to_word(value) for value in values]
    except (TypeError, ValueError, RecursionError):
        message = "a choice is neither text nor a finite number; put it in quotes: '2026-01-01'"
        raise SpecError([Fault(path=path, message=message)]) from None
    if len(set(texts)) < len(texts):
        raise SpecError([Fault(path=path, message="has a choice twice")])
    return Choice(values=tuple(values))


def to_word(value: object) -> str:
    """A choice as text, by which it is told from the others: 1 and true are two."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _range_faults(low: float, high: float, step: float | None, *, log: bool) -> Iterator[Fault]:
    if low >= high:
        yield Fault(path="", message=f"begins with {low:g} and ends with {high:g}; write the smaller one first")
    elif log and low <= 0:
        yield Fault(path="log", message=f"needs values above 0, and the least is {low:g}")
    elif log and step is not None:
        yield Fault(path="step", message="does not go with log: write one of the two")
    elif step is not None and (Decimal(repr(high)) - Decimal(repr(low))) / Decimal(repr(step)) > _MOST_STEPS:
        yield Fault(path="step", message=f"{step:g} is too small for a range from {low:g} to {high:g}")
    elif step is not None and (Decimal(repr(high)) - Decimal(repr(low))) % Decimal(repr(step)):
        yield Fault(path="step", message=f"{step:g} does not lead from {low:g} to {high:g}")
