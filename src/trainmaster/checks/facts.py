"""Tables made of what each check states beside its code (GPU, EXPECTS, COMPARES, METRICS).

A check that cannot be loaded states nothing here; the runner reports it as an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from trainmaster.checks import registry
from trainmaster.checks.comparison import EqualValue, Peer, Rule
from trainmaster.checks.contract import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What all checks state, by what is asked for."""

    of_gpus: frozenset[str]  # checks of a GPU itself
    measured_by: Mapping[str, str]  # expectation → check
    rules: Mapping[tuple[str, str], Rule]  # (check, value) → rule
    same: Mapping[str, EqualValue]  # value → rule that holds everywhere
    peers: Mapping[str, Peer]
    metrics: Mapping[str, Mapping[str, str]]  # metric → check → name of the value


def read() -> Facts:
    """Facts of the checks that are in the folders now."""
    return _read(registry.paths())


@functools.cache  # a comparison asks for each value of each node
def _read(_paths: tuple[tuple[str, ...], ...]) -> Facts:
    checks: dict[str, Check] = {}
    for name in registry.names():
        with contextlib.suppress(Exception):
            checks[name] = registry.load(name)
    return gather(checks)


def gather(checks: Mapping[str, Check]) -> Facts:
    everywhere = [rule for check in checks.values() for rule in check.COMPARES if rule.everywhere]
    metrics: dict[str, dict[str, str]] = {}
    for name, check in checks.items():
        for metric, value in check.METRICS.items():
            metrics.setdefault(metric, {})[name] = value
    return Facts(
        of_gpus=frozenset(name for name, check in checks.items() if check.GPU),
        measured_by={field: name for name, check in checks.items() for field in check.EXPECTS},
        rules={(name, rule.name): rule for name, check in checks.items() for rule in check.COMPARES},
        same={rule.name: rule for rule in everywhere if isinstance(rule, EqualValue)},
        peers={rule.name: rule for rule in everywhere if isinstance(rule, Peer)},
        metrics=metrics,
    )
