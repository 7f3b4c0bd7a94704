"""Rules for values that are compared between nodes: equal settings, similar numbers, and their tolerances.

A check lists the rules of its values in COMPARES. A rule holds for the values of its own check; one with `everywhere`
holds for every value of that name, whichever result reports it: a driver is a driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainmaster.core.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualValue:
    """A value that is equal on equal nodes. `alike`: only nodes with the same GPUs are compared."""

    name: str
    words: str
    verdict: Verdict
    action: str
    alike: bool = False
    tolerance: float = 0.0  # share by which numbers may differ: firmware keeps some memory for itself
    none: str = ""  # meaning of None; empty: not reported
    unit: str = ""
    fewer: Verdict | None = None  # verdict where a number is below that of the majority; None: `verdict`
    everywhere: bool = False

    def judge(self, value: object, common: object) -> Verdict:
        """Verdict on a value that is not the majority's. Of devices that differ within a node the lowest counts."""
        values = value if isinstance(value, frozenset) else (value,)
        numbers = isinstance(common, (int, float)) and all(isinstance(item, (int, float)) for item in values)
        lower = numbers and min(values) < common
        return self.fewer if self.fewer is not None and lower else self.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A number that is similar on equal machines, and the smallest difference worth reporting.

    Everywhere, `tflops` is also the rule of `bf16_tflops`: the last word of a name is its unit.
    """

    name: str
    words: str  # empty: the check and the value are named
    unit: str
    bad: Literal["low", "high", "both"]
    least_far: float  # a share of the median, or in the unit itself where `share` is False
    action: str
    share: bool = True
    fail_far: float | None = None  # distance to the bad side from which it fails; None: it only warns
    everywhere: bool = False

    def least(self, median: float) -> float:
        return self.least_far * abs(median) if self.share else self.least_far

    def matters(self, far: float) -> bool:
        return self.bad == "both" or (far < 0) == (self.bad == "low")

    def beyond(self, far: float, best: float) -> bool:
        """Whether a distance from the best quarter is a fault, however far the others scatter."""
        least = self.fail_far if self.fail_far is not None else 2 * self.least_far
        return self.bad != "both" and self.matters(far) and abs(far) >= (least * abs(best) if self.share else least)

    def fails(self, far: float, median: float) -> bool:
        if self.fail_far is None or (far > 0) != (self.bad == "high"):
            return False
        return abs(far) >= (self.fail_far * abs(median) if self.share else self.fail_far)


Rule = EqualValue | Peer


def software(name: str, words: str) -> EqualValue:
    # All ranks of a job need the same software: NCCL refuses or hangs across versions, and another driver makes a node
    # choose other transports than its peers.
    action = f"install the same {words} on this node as on the others"
    return EqualValue(name=name, words=words, verdict=Verdict.FAIL, action=action, everywhere=True)


def firmware(name: str, words: str) -> EqualValue:
    action = "bring its firmware to the others' version"
    return EqualValue(name=name, words=words, verdict=Verdict.WARN, action=action, alike=True, everywhere=True)


def setting(name: str, words: str, *, alike: bool = False, none: str = "", unit: str = "") -> EqualValue:
    action = f"set the {words} of this node as on the others"
    return EqualValue(name=name, words=words, verdict=Verdict.WARN, action=action, alike=alike, none=none, unit=unit)


def part(name: str, words: str, action: str, *, tolerance: float = 0.0, unit: str = "") -> EqualValue:
    return EqualValue(
        name=name, words=words, verdict=Verdict.WARN, action=action, alike=True, tolerance=tolerance, unit=unit
    )


def hardware(name: str, words: str, action: str, *, tolerance: float = 0.0, unit: str = "") -> EqualValue:
    # The GPUs of a node agree with each other, so no check of the node sees it; the slowest node sets the pace of all.
    return EqualValue(
        name=name,
        words=words,
        verdict=Verdict.WARN,
        fewer=Verdict.FAIL,
        action=action,
        alike=True,
        tolerance=tolerance,
        unit=unit,
    )


def adapters(name: str, words: str) -> EqualValue:
    # A rail that one node lacks slows every collective of the job; one too many may serve storage.
    return hardware(name, words, "look for a missing network card; in a container, give it the devices")


def rate(name: str, unit: str) -> Peer:
    # Equal GPUs differ by some 3 % in clock at one power limit; 7 % is beyond that, 20 % is a fault of any cause.
    action = "run level 2 again on this node alone; if it repeats, drain it: the whole job runs at its speed"
    return Peer(
        name=name, words="", unit=unit, bad="low", least_far=0.07, fail_far=0.20, action=action, everywhere=True
    )
