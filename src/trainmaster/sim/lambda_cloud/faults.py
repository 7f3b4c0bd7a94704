"""Faults of the simulated cloud: their names, their default rates, and when each happens.

A fault happens where its rate says so, drawn from the seed and its own sequence, or where it was armed for the next
opportunity. The same seed and the same requests give the same faults.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainmaster.core.errors import UsageError

Kind = Literal["answer", "launch", "instance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One fault: `answer` is drawn per request, `launch` per launch, `instance` per launch with a random moment."""

    kind: Kind
    rate: float  # with `--faults all`
    effect: str
    from_s: float = 0.0  # range of its delay or duration, in simulated seconds
    to_s: float = 0.0


FAULTS: Mapping[str, FaultKind] = {
    "rate-limit": FaultKind(kind="answer", rate=0.03, effect="429 with an error body"),
    "rate-limit-empty": FaultKind(kind="answer", rate=0.02, effect="429 without a body"),
    "error-500": FaultKind(kind="answer", rate=0.02, effect="500 before anything happened, as JSON or HTML"),
    "garbled-json": FaultKind(kind="answer", rate=0.02, effect="the request is done, its answer is broken JSON"),
    "slow-answer": FaultKind(kind="answer", rate=0.05, effect="the answer comes late", from_s=2.0, to_s=10.0),
    "launch-500": FaultKind(kind="answer", rate=0.05, effect="500 after the launch happened"),
    "launch-timeout": FaultKind(
        kind="answer", rate=0.05, effect="the launch happened; the connection is held, then cut", from_s=300, to_s=600
    ),
    "launch-cut": FaultKind(kind="answer", rate=0.03, effect="the launch happened; the connection is cut at once"),
    "capacity-hidden": FaultKind(kind="answer", rate=0.1, effect="a listing leaves out a region that has capacity"),
    "capacity-flicker": FaultKind(kind="launch", rate=0.15, effect="listed capacity is refused at the launch"),
    "late-ip": FaultKind(kind="launch", rate=0.1, effect="active before it has an IP address", from_s=20, to_s=90),
    "ssh-late": FaultKind(kind="launch", rate=0.1, effect="active before its SSH server", from_s=20, to_s=90),
    "stuck-booting": FaultKind(kind="launch", rate=0.03, effect="stays booting"),
    "unhealthy": FaultKind(kind="launch", rate=0.03, effect="becomes unhealthy instead of active"),
    "cuda-broken": FaultKind(kind="launch", rate=0.05, effect="active, but its nvidia-smi fails; stays with the GPUs"),
    "duplicate-name": FaultKind(kind="launch", rate=0.05, effect="an instance of somebody else has the same name"),
    "ip-reuse": FaultKind(kind="launch", rate=0.2, effect="has the IP address of an instance that ended"),
    "preempted": FaultKind(kind="instance", rate=0.05, effect="preempted while active", from_s=0, to_s=600),
    "terminated": FaultKind(kind="instance", rate=0.03, effect="terminated without a request", from_s=0, to_s=600),
    "link-cut": FaultKind(kind="instance", rate=0.1, effect="its SSH connections are cut", from_s=0, to_s=300),
}


def parse_rates(text: str) -> dict[str, float]:
    """Rates from `all`, `none` or `name=rate,…`; `all,NAME=RATE` changes single ones. UsageError lists the names."""
    rates: dict[str, float] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, given, value = word.partition("=")
        if word == "all":
            rates |= {key: fault.rate for key, fault in FAULTS.items()}
        elif word == "none":
            rates = {}
        elif name not in FAULTS:
            raise UsageError(f"--faults {word!r}: no such fault; there are {', '.join(FAULTS)}")
        else:
            rates[name] = _rate(word, value) if given else FAULTS[name].rate
    return rates


def _rate(word: str, value: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise UsageError(f"--faults {word!r}: the rate must be a number from 0 to 1")
    return rate


class Faults:
    """Draws. Not locked: its owner holds a lock."""

    def __init__(self, *, seed: int, rates: Mapping[str, float]) -> None:
        self.rates = dict(rates)
        self.injected: Counter[str] = Counter()
        self._armed: Counter[str] = Counter()
        self._draws = {name: random.Random(f"{seed} {name}") for name in FAULTS}  # noqa: S311 (no secret)
        self._delays = {name: random.Random(f"{seed} {name} delay") for name in FAULTS}  # noqa: S311

    def arm(self, name: str, times: int = 1) -> None:
        """Let the fault happen at its next opportunities."""
        if name not in FAULTS:
            raise UsageError(f"{name!r}: no such fault; there are {', '.join(FAULTS)}")
        self._armed[name] += times

    def happens(self, name: str) -> bool:
        """Whether the fault happens at this opportunity; counts it."""
        drawn = self._draws[name].random() < self.rates.get(name, 0.0)  # drawn always: arming shifts no sequence
        if self._armed[name] > 0:
            self._armed[name] -= 1
            drawn = True
        self.injected[name] += drawn
        return drawn

    def delay_s(self, name: str) -> float:
        """Random delay of a fault in simulated seconds."""
        fault = FAULTS[name]
        return self._delays[name].uniform(fault.from_s, fault.to_s)

    @property
    def armed(self) -> dict[str, int]:
        return {name: times for name, times in self._armed.items() if times > 0}
