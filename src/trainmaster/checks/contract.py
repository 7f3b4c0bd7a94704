"""Contract of a check: one module with its facts, a `read` and a `judge`.

    LEVEL: int                                             1 passive (seconds), 2 uses the GPU, 3 stress
    GPU: bool                                              it tests a GPU: a node that fails it joins no collectives
    EXPECTS: tuple[str, ...]                               expectations that it measures, fields of core.expect.Expect
    COMPARES: tuple[Rule, ...]                             values that are compared between nodes (comparison)
    METRICS: Mapping[str, str]                             field of health_check_metrics.json → value, or VERDICT
    TIMEOUT_S: float                                       optional; the runner stops waiting after it
    def read(host: Host) -> Data                           asks the machine, and only through `host`
    def judge(data: Data, expect: Expect) -> Finding | list[Finding]          pure

The runner owns the rest: deadline, errors, events, exit code. The tables over all checks are in `facts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from trainmaster.checks.comparison import EqualValue, Peer, Rule
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding
from trainmaster.node.host import Host

LEVELS = (1, 2, 3)
TIMEOUT_S = 60.0  # default of a check; above the 30 s default of a command, so that the command's own error is reported
VERDICT = "verdict"  # in METRICS: the worst verdict of the check, in place of a value
_EXPECTATIONS = frozenset(field.name for field in dataclasses.fields(Expect))


class Check(Protocol):
    """Interface of a check module."""

    LEVEL: int
    GPU: bool
    EXPECTS: tuple[str, ...]
    COMPARES: tuple[Rule, ...]
    METRICS: Mapping[str, str]

    def read(self, host: Host) -> Any: ...

    def judge(self, data: Any, expect: Expect) -> Finding | list[Finding]: ...


def find_faults(check: object) -> list[str]:
    """What is missing or wrong in the facts that a check states, one line each."""
    return list(_faults(vars(check)))


def _faults(facts: Mapping[str, Any]) -> Iterator[str]:
    missing = [name for name in ("LEVEL", "GPU", "EXPECTS", "COMPARES", "METRICS") if name not in facts]
    if missing:
        yield f"state {', '.join(missing)} beside its code (checks/contract.py says what each means)"
        return
    if facts["LEVEL"] not in LEVELS:
        yield f"LEVEL is {facts['LEVEL']!r}; it is 1, 2 or 3"
    if not isinstance(facts["GPU"], bool):
        yield f"GPU is {facts['GPU']!r}; it is True or False"
    if not isinstance(facts["EXPECTS"], tuple):
        yield "EXPECTS is no tuple; write () where it measures no expectation"
    elif unknown := [name for name in facts["EXPECTS"] if name not in _EXPECTATIONS]:
        yield f"EXPECTS names {', '.join(map(str, unknown))}, which is no field of Expect"
    if not isinstance(facts["COMPARES"], tuple) or not all(
        isinstance(r, (EqualValue, Peer)) for r in facts["COMPARES"]
    ):
        yield "COMPARES is no tuple of rules (checks/comparison.py); write () where nothing is compared"
    metrics = facts["METRICS"]
    if not isinstance(metrics, Mapping) or not all(isinstance(word, str) for item in metrics.items() for word in item):
        yield "METRICS is no mapping of text to text; write {} where it fills no field"
