"""Results of checks: findings, coverage, one overall verdict, one exit code.

Not measured is never a pass: PASS needs every planned (check, device) to have reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainmaster.core.compat import StrEnum

# In the values of a warning: faults that could not be seen here, because rights keep their source from this process.
UNSEEN = "unseen"


class Verdict(StrEnum):
    """Verdict of one check on one device, or on the whole node."""

    PASS = "pass"  # noqa: S105 (a verdict, not a password)
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"  # does not apply here, with its reason and its proof
    ERROR = "error"  # applies, and could not be measured


class Overall(StrEnum):
    """Verdict of everything that was planned."""

    PASS = "PASS"  # noqa: S105
    WARN = "WARN"
    FAIL = "FAIL"
    INCOMPLETE = "INCOMPLETE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of a check: verdict, reason, one suggested action, and the measured values."""

    verdict: Verdict
    reason: str
    action: str | None = None
    device: str | None = None  # "gpu0", "mlx5_1"; None: the whole node
    values: Mapping[str, Any] = field(default_factory=dict)
    proof: str | None = None  # of a skip: what was read that shows that the check does not apply


def ok(reason: str, *, device: str | None = None, **values: Any) -> Finding:
    return Finding(verdict=Verdict.PASS, reason=reason, device=device, values=values)


def warn(reason: str, *, action: str, device: str | None = None, **values: Any) -> Finding:
    return Finding(verdict=Verdict.WARN, reason=reason, action=action, device=device, values=values)


def fail(reason: str, *, action: str, device: str | None = None, **values: Any) -> Finding:
    return Finding(verdict=Verdict.FAIL, reason=reason, action=action, device=device, values=values)


def skip(reason: str, *, proof: str, device: str | None = None, **values: Any) -> Finding:
    """Finding of a check that does not apply. `proof`: what was read that shows it; an absent answer is an `error`."""
    return Finding(verdict=Verdict.SKIP, reason=reason, device=device, values=values, proof=proof)


def error(reason: str, *, action: str, device: str | None = None, **values: Any) -> Finding:
    return Finding(verdict=Verdict.ERROR, reason=reason, action=action, device=device, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Findings of one check on one node."""

    check: str
    findings: tuple[Finding, ...]
    took_s: float

    @classmethod
    def of(cls, check: str, findings: Iterable[Finding]) -> CheckResult:
        """Findings that were judged from what others measured: that took no time of its own."""
        return cls(check=check, findings=tuple(findings), took_s=0.0)

    @property
    def verdict(self) -> Verdict:
        """Worst of the findings; a check without findings was not measured."""
        return max((finding.verdict for finding in self.findings), key=WEIGHT.__getitem__, default=Verdict.ERROR)


WEIGHT = {Verdict.SKIP: 0, Verdict.PASS: 1, Verdict.WARN: 2, Verdict.ERROR: 3, Verdict.FAIL: 4}


def judge_overall(results: Sequence[CheckResult], *, planned: Collection[str]) -> Overall:
    """FAIL beats INCOMPLETE beats WARN beats PASS. A check that was planned or run and has no finding is INCOMPLETE."""
    counts = Counter(finding.verdict for result in results for finding in result.findings)
    if counts[Verdict.FAIL]:
        return Overall.FAIL
    reported = {result.check for result in results if result.findings}
    whole = {*planned, *(result.check for result in results)} <= reported
    measured = counts[Verdict.PASS] + counts[Verdict.WARN]
    if counts[Verdict.ERROR] or not whole or not measured:
        return Overall.INCOMPLETE
    return Overall.WARN if counts[Verdict.WARN] else Overall.PASS


def demand(results: Sequence[CheckResult], required: Collection[str] | None = None) -> tuple[CheckResult, ...]:
    """The results, where a required check that left faults unseen is an error. `required` None: every check is."""
    return tuple(
        replace(result, findings=tuple(_demanded(finding) for finding in result.findings))
        if required is None or result.check in required
        else result
        for result in results
    )


def _demanded(finding: Finding) -> Finding:
    hidden = finding.verdict is Verdict.WARN and finding.values.get(UNSEEN)
    return replace(finding, verdict=Verdict.ERROR) if hidden else finding


_EXIT = {Overall.PASS: 0, Overall.WARN: 0, Overall.FAIL: 1, Overall.INCOMPLETE: 3}
_NAGIOS = {Overall.PASS: 0, Overall.WARN: 1, Overall.FAIL: 2, Overall.INCOMPLETE: 3}


def exit_code(overall: Overall, *, strict: bool = False, nagios: bool = False) -> int:
    """Exit code of the process; `strict` turns WARN into 1, `nagios` gives 0/1/2/3."""
    if nagios:
        return _NAGIOS[overall]
    return 1 if strict and overall is Overall.WARN else _EXIT[overall]
