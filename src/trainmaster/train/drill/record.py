"""Record of one attempt: its events, and the samples its ranks consumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.train.drill import sample_log

Samples = Mapping[int, Mapping[int, str]]  # step → sample number → digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the run, up to its end or its death."""

    ranks: int
    codes: tuple[int, ...]  # of the ranks; negative is a signal
    events: tuple[Mapping[str, Any], ...]
    samples: Samples

    def named(self, phase: str, event: str) -> list[Mapping[str, Any]]:
        """The data of every such event, in order."""
        return [
            item.get("data", {}) for item in self.events if (item.get("phase"), item.get("event")) == (phase, event)
        ]

    @property
    def killed(self) -> bool:
        return -9 in self.codes

    @property
    def began(self) -> bool:
        """Whether it came as far as training; one that was killed while it loaded did not."""
        return bool(self.named("TRAINING", "start"))

    @property
    def resumed_from(self) -> int | None:
        """The step it went on from; None for one that started at step 0 or never began."""
        started = self.named("TRAINING", "start")
        return started[0].get("resumed_from") if started else None

    @property
    def losses(self) -> dict[int, float]:
        return {data["step"]: data["loss"] for data in self.named("STEP", "metrics")}

    @property
    def last_step(self) -> int | None:
        """The last step it has certainly done: reported, or followed by a next one. Numbers come a step late."""
        done = [*self.losses, *(step - 1 for step in self.samples if step > (self.resumed_from or 0) + 1)]
        return max(done, default=self.resumed_from)

    @property
    def saved(self) -> list[int]:
        """Steps that it said are saved."""
        return [data["step"] for data in self.named("CHECKPOINT", "saved")]

    def saved_to(self, tier: str) -> list[int]:
        return [data["step"] for data in self.named("CHECKPOINT", "saved") if data.get("tier", "disk") == tier]

    @property
    def loaded_tier(self) -> str:
        loaded = self.named("CHECKPOINT", "loaded")
        return str(loaded[-1].get("tier") or "disk") if loaded else ""

    @property
    def bound_steps(self) -> int | None:
        """The most steps that a killed process may cost, as the run itself last said."""
        for data in reversed(self.named("CHECKPOINT", "bound")):
            if data.get("withdrawn"):
                return None
            held = data.get("losses", {}).get("process", data)
            if held.get("lost_steps") is not None:
                return int(held["lost_steps"])
        return None


def read(events: Path, samples: Path, *, ranks: int, codes: tuple[int, ...]) -> Attempt:
    """Read an attempt from its event file and its sample logs; truncated lines are left out."""
    return Attempt(ranks=ranks, codes=codes, events=tuple(_lines(events)), samples=sample_log.read(samples))


def read_starts(events: Path, samples: Path, *, ranks: int, codes: tuple[int, ...]) -> list[Attempt]:
    """The same for an attempt that was recovered in place: each start of its ranks as if it were an attempt.

    A recovery belongs to the start that it leads to; `codes` are of the last start, and those before it were killed.
    """
    starts: list[list[Mapping[str, Any]]] = [[]]
    for item in _lines(events):
        if (item.get("phase"), item.get("event")) == ("RECOVERY", "start"):
            starts.append([])
        starts[-1].append(item)
    return [
        Attempt(
            ranks=ranks,
            codes=codes if number == len(starts) - 1 else (-9,) * ranks,
            events=tuple(items),
            samples=sample_log.read(sample_log.of_start(samples, number)),
        )
        for number, items in enumerate(starts)
    ]


def _lines(events: Path) -> list[Mapping[str, Any]]:
    objects: list[Mapping[str, Any]] = []
    try:
        lines = events.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        try:
            item = json.loads(line)
        except ValueError:
            continue
        if isinstance(item, dict):
            objects.append(item)
    return objects
