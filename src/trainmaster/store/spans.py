"""Starts and ends of one phase, folded into one span; and merged with the row of an earlier fold."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from trainmaster.core.events import Event

_LONGEST_S = 1e12  # a larger value is no duration, and sums of such values would overflow a float
_LONG_AGO = -(2**63)
_Key = tuple[int, int, int]  # attempt number, microseconds since 1970, sequence number


class Span:
    """What the starts and ends so far state. Merging is commutative: any order of lines gives the same span."""

    __slots__ = ("_config_key", "_partials", "_seconds", "_seconds_key", "began", "config", "ended")

    def __init__(self) -> None:
        self.began: datetime | None = None
        self.ended: datetime | None = None
        self.config: dict[str, Any] | None = None
        self._config_key: _Key | None = None
        self._seconds: float | None = None  # of the newest end that states a duration
        self._seconds_key: _Key | None = None
        self._partials: list[float] = []  # exact sum of all stated durations

    def add(self, name: str, attempt: int, event: Event) -> None:
        """Fold in one `start` or `end`."""
        ts = event.ts
        key = (attempt, _microseconds(ts), -1 if event.seq is None else event.seq)
        if name == "start":
            if ts is not None and (self.began is None or ts < self.began):
                self.began = ts
            if config := _read_config(event.data):
                self._take_config(config, key)
            return
        if ts is not None and (self.ended is None or ts > self.ended):
            self.ended = ts
        if (seconds := _read_seconds(event.data)) is not None:
            self._take_seconds(seconds, key)
            _add_exactly(self._partials, seconds)

    def merge_row(self, row: Mapping[str, Any]) -> None:
        """Merge a row of `iterations` or `steps`."""
        self.merge(began=row["started_at"], ended=row["completed_at"], config=row["config"], kept=row["aggregate"])

    def merge(
        self,
        *,
        began: datetime | None,
        ended: datetime | None,
        config: Mapping[str, Any] | None,
        kept: Mapping[str, Any] | None,
    ) -> None:
        kept = kept or {}
        ended = ended if ended is not None else _read_time(kept.get("ended"))
        if began is not None and (self.began is None or began < self.began):
            self.began = began
        if ended is not None and (self.ended is None or ended > self.ended):
            self.ended = ended
        if config:
            self._take_config(dict(config), _read_key(kept.get("config")))
        if kept.get("seconds") is not None:
            self._take_seconds(kept["seconds"], _read_key(kept.get("seconds_of")))
        for part in kept.get("partials", ()):
            _add_exactly(self._partials, part)

    def merge_kept(self, kept: Mapping[str, Any] | None) -> None:
        """Merge what `kept(began=True)` gave: of a span that has no columns of its own."""
        began = _read_time((kept or {}).get("began"))
        self.merge(began=began, ended=None, config=None, kept=kept)

    def kept(self, *, began: bool = False) -> dict[str, Any]:
        """What a later merge needs beside the columns of the row; with the start, where no column has it."""
        state: dict[str, Any] = {}
        if began and self.began is not None:
            state["began"] = self.began.isoformat()
        if self.ended is not None:
            state["ended"] = self.ended.isoformat()
        if self._config_key is not None:
            state["config"] = list(self._config_key)
        if self._seconds is not None:
            state |= {"seconds": self._seconds, "seconds_of": list(self._seconds_key or ()), "partials": self._partials}
        return state

    @property
    def newest_s(self) -> float | None:
        """The newest stated duration; without one, first start to last end."""
        return self._seconds if self._seconds is not None else self._between_s

    @property
    def total_s(self) -> float | None:
        """The sum of all stated durations (a phase that was repeated or resumed); without one, start to end."""
        return math.fsum(self._partials) if self._partials else self._between_s

    @property
    def _between_s(self) -> float | None:
        if self.began is None or self.ended is None:
            return None
        return max(0.0, (self.ended - self.began).total_seconds())

    def _take_config(self, config: dict[str, Any], key: _Key) -> None:
        if self._config_key is None or key > self._config_key:
            self.config, self._config_key = config, key
        elif key == self._config_key and _text(config) > _text(self.config):
            self.config = config

    def _take_seconds(self, seconds: float, key: _Key) -> None:
        if self._seconds_key is None or key > self._seconds_key:
            self._seconds, self._seconds_key = seconds, key
        elif key == self._seconds_key:
            self._seconds = max(seconds, self._seconds if self._seconds is not None else seconds)


def read_whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def read_text(value: object) -> str | None:
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "" else None


def _add_exactly(partials: list[float], value: float) -> None:
    """Add to a sum held as non-overlapping floats, without rounding: math.fsum of them is the same in any order."""
    count = 0
    for other in partials:
        if abs(value) < abs(other):
            value, other = other, value  # noqa: PLW2901
        high = value + other
        low = other - (high - value)
        if low:
            partials[count] = low
            count += 1
        value = high
    partials[count:] = [value]


def _microseconds(ts: datetime | None) -> int:
    return _LONG_AGO if ts is None else round(ts.timestamp() * 1_000_000)


def _read_key(value: Any) -> _Key:
    return (int(value[0]), int(value[1]), int(value[2])) if value else (0, _LONG_AGO, -1)


def _read_time(value: str | None) -> datetime | None:
    return datetime.fromisoformat(value) if value else None


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _read_config(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config that a start states: its `config`, or all of its data."""
    for name in ("config", "step_config", "training_config"):
        if isinstance(data.get(name), Mapping):
            return dict(data[name])
    return dict(data) or None


def _read_seconds(data: Mapping[str, Any]) -> float | None:
    for name in ("time_taken", "duration", "duration_s", "step_time"):
        value = data.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LONGEST_S:
            return float(value)
    return None
