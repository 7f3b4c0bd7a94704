"""One event as one line for people; `--json` has every field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WORST = ("fail", "error", "warn", "pass", "skip")


def describe(phase: str, event: str, data: Mapping[str, Any]) -> str:
    """`PREFLIGHT cpu pass: 2 CPUs usable`; other events as `PHASE event name=value …` without nested values."""
    findings = data.get("findings") if (phase, event) == ("PREFLIGHT", "check") else None
    valid = [item for item in findings if isinstance(item, Mapping)] if isinstance(findings, list) else []
    if valid:
        return _describe_check(data, valid)
    words = (f"{name}={_text(value)}" for name, value in data.items() if _is_plain(value) and name != "message")
    message = data.get("message")
    return " ".join([phase, event, *words]) + (f": {message}" if message else "")


def _describe_check(data: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> str:
    """The worst finding; a check of eight GPUs has eight, which are often the same."""
    worst = min(findings, key=_rank)
    device = f" {worst['device']}" if worst.get("device") else ""
    more = sum(_rank(item) == _rank(worst) for item in findings) - 1
    rest = f" (and {more} more)" if more else ""
    return f"PREFLIGHT {data.get('check')}{device} {data.get('verdict')}: {worst.get('reason')}{rest}"


def _rank(finding: Mapping[str, Any]) -> int:
    word = str(finding.get("verdict"))
    return _WORST.index(word) if word in _WORST else 0


def _is_plain(value: object) -> bool:
    return value is not None and not isinstance(value, (Mapping, list, tuple))


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return str(value)
