"""Hourly prices of nodes, each with its source. An unknown price stays unknown; it is never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# A working day: a run started in the morning and found dead in the evening.
ASSUMED_HOURS = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Price of one node per hour, and its source."""

    usd_per_hour: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Rates by profile (the instance type a node was judged as). `every` is the user's own rate for all nodes."""

    by_profile: Mapping[str, Rate] = field(default_factory=dict)
    every: Rate | None = None
    assumed_hours: float = ASSUMED_HOURS
