"""Lookup of the rule for a value that is compared between nodes. The checks state the rules (COMPARES)."""

from __future__ import annotations

import functools
from dataclasses import replace

from trainmaster.checks import facts, registry
from trainmaster.checks.comparison import EqualValue, Peer, Rule

# Software that selects kernels: digests are comparable only where it is equal.
SOFTWARE = frozenset({"driver", "cuda", "torch", "torch_cuda"})


def same(check: str, name: str) -> EqualValue | None:
    """The rule for a value that should be equal, if there is one."""
    rule = _find(registry.paths(), check, name)
    return rule if isinstance(rule, EqualValue) else None


def peer(check: str, name: str) -> Peer | None:
    """The rule for a number that should be alike, if there is one."""
    rule = _find(registry.paths(), check, name)
    return rule if isinstance(rule, Peer) else None


@functools.lru_cache(maxsize=10_000)  # asked several times for each value of each node
def _find(_paths: tuple[tuple[str, ...], ...], check: str, name: str) -> Rule | None:
    """The rule of the check itself, else one that holds everywhere; a setting (a port's rate) comes before a number."""
    stated = facts.read()
    last = name.rpartition(".")[2]
    rule = stated.rules.get((check, name)) or stated.same.get(last)
    rule = rule or stated.peers.get(last) or stated.peers.get(last.rpartition("_")[2])  # bf16_tflops counts TFLOPS
    return replace(rule, words=f"of {check} {name}") if isinstance(rule, Peer) and not rule.words else rule
