"""Results of fault isolation: measurements, suspects with evidence, one diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainmaster.core.results import Overall

Kind = Literal["node", "link", "switch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One pair test: measured and healthy GB/s. `gbps` None: no answer."""

    round: int
    a: str
    b: str
    gbps: float | None
    healthy_gbps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A part that may be bad. `confidence` is the posterior probability against every rival explanation."""

    kind: Kind
    name: str
    confidence: float
    loss: float | None  # share of the bandwidth that is lost; None: it gives no answer, or only sometimes
    slow: int  # measurements through it that were slow or unanswered …
    measured: int  # … of so many through it
    evidence: tuple[Measurement, ...]  # the slow ones, at most EVIDENCE_KEPT

    @property
    def words(self) -> str:
        """The part in plain words."""
        if self.kind == "link" and self.name.endswith(ANY_UPLINK):
            return f"one of the uplinks of {self.name.removesuffix(ANY_UPLINK)}"
        if self.kind == "switch" and self.name == ANY_SPINE:
            return "a spine switch"
        if self.kind == "switch" and self.name == ANY_SWITCH:
            return "a switch or link between these nodes"
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """Progress of one round: its purpose and result."""

    number: int
    purpose: str
    pairs: int
    slow: int
    leading: tuple[Suspect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer. FAIL: `suspects` are bad. PASS: every part was measured enough to be cleared. Else INCOMPLETE."""

    verdict: Overall
    suspects: tuple[Suspect, ...]  # named: confident, and shown by repeats
    candidates: tuple[tuple[Suspect, ...], ...]  # in each group one is bad, and the data do not say which
    cleared: int  # parts whose fault the data contradict
    not_cleared: tuple[str, ...]  # parts the data neither name nor clear
    notes: tuple[str, ...]  # what stood in the way, in words
    action: str  # the one thing to do next
    rounds: int
    measurements: int
    pairs_tested: int  # different pairs, of `pairs` there are: the path of an untested pair is not spoken for
    pairs: int
    healthy_gbps: float | None  # of the typical pair; None where nothing answered
    noise: float | None  # scatter of healthy results, as a share


EVIDENCE_KEPT = 12
ANY_UPLINK = " uplink"  # without routes the leaf is known, its uplink is not
ANY_SPINE = "any spine"
ANY_SWITCH = "any switch"  # without racks nothing is known of what lies between nodes
