"""Pre-flight checks as a page shows them: what is wrong first, and what was planned and never spoke."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.api.codec import fill
from trainmaster.api.run import Check, Preflight
from trainmaster.core.results import CheckResult, Finding, Verdict, judge_overall
from trainmaster.pages.parts.downsample import text

_URGENCY = {Verdict.FAIL: 0, Verdict.ERROR: 1, Verdict.WARN: 2}
Results = Mapping[str, tuple[CheckResult, float | None]]  # by check, with the seconds it took


def shape(attempt: int, results: Results, *, planned: Sequence[str], over: bool) -> Preflight:
    """The checks of one node. Not `over`: what has not spoken yet still may."""
    rows = [
        fill(Check, finding, check=name, took_s=took_s)
        for name, (result, took_s) in results.items()
        for finding in result.findings
    ]
    silent = _error("planned, but it never reported")
    rows += [fill(Check, silent, check=name, took_s=None) for name in planned if over and name not in results]
    # What is wrong stands first; the rest in the order it was planned.
    order = {name: place for place, name in enumerate(planned)}
    rows.sort(key=lambda row: (_URGENCY.get(row.verdict, 3), order.get(row.check, len(order))))
    overall = judge_overall([result for result, _ in results.values()], planned=planned) if over else None
    return Preflight(attempt=attempt, overall=overall, checks=tuple(rows))


def read_findings(raw: object) -> tuple[Finding, ...]:
    """The findings of a check event; one that cannot be read counts as not measured."""
    if not isinstance(raw, list) or not raw:
        return (_error("the check reported no findings"),)
    return tuple(_finding(item) if isinstance(item, dict) else _error("a finding that cannot be read") for item in raw)


def _finding(item: Mapping[str, Any]) -> Finding:
    word = item.get("verdict")
    known = word in tuple(Verdict)
    values = item.get("values")
    return Finding(
        verdict=Verdict(str(word)) if known else Verdict.ERROR,
        reason=(text(item, "reason") or "") if known else f"unknown verdict {word!r}: {text(item, 'reason') or ''}",
        action=text(item, "action"),
        device=text(item, "device"),
        values=values if isinstance(values, dict) else {},
    )


def _error(reason: str) -> Finding:
    return Finding(verdict=Verdict.ERROR, reason=reason, action="see the agent's log")
