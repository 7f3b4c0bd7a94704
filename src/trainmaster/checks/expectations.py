"""Results for stated expectations that no check measured.

An expectation that nothing measured is an error, so the run is INCOMPLETE: it is never dropped.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trainmaster.checks import facts, registry
from trainmaster.core.expect import OF_COLLECTIVES, Expect, implies_collectives, show_value
from trainmaster.core.results import CheckResult, Finding, error
from trainmaster.core.schema import to_plain

COLLECTIVES = "collectives"  # between ranks: no check of one node measures it
EXPECTATIONS = "expectations"  # result for expectations of a higher level than the run, or of a check left out
OPTIONAL = ("dcgm", "gdr", "fabric", "persistence", "collectives")  # false: the thing may be absent
NAMES = (COLLECTIVES, EXPECTATIONS)  # results that are computed from the plan, and not read from the machine


def unmeasured(
    expect: Expect, *, level: int, left_out: Collection[str] = (), alone: bool = True
) -> tuple[CheckResult, ...]:
    """Results for expectations that a run of this level, without `left_out`, does not measure.

    `alone`: no collectives follow.
    """
    results: list[CheckResult] = []
    implied = implies_collectives(expect) if alone else []
    if implied:
        reason = f"{', '.join(implied)} is expected, and no collectives were run"
        action = "run `trainmaster bandwidth`, or `trainmaster check --level 2 --on TARGET`"
        results.append(CheckResult.of(COLLECTIVES, [error(reason, action=action)]))
    stated = {name: value for name, value in to_plain(expect).items() if _demands(name, value)}
    above = [_above(name, value, level, left_out) for name, value in stated.items()]
    if any(above):
        results.append(CheckResult.of(EXPECTATIONS, [finding for finding in above if finding is not None]))
    return tuple(results)


def _demands(name: str, value: Any) -> bool:
    """Whether a value must be measured. 0 and false are demands too (`oom_kills=0`, `mig=false`)."""
    return value not in (None, [], ()) and not (value is False and name in OPTIONAL)


def _above(name: str, value: Any, level: int, left_out: Collection[str]) -> Finding | None:
    """Error for an expectation whose check belongs to a higher level, was left out, or could not be loaded."""
    shown = show_value(value)
    check = COLLECTIVES if name in OF_COLLECTIVES else facts.read().measured_by.get(name)
    if check is None:
        return error(f"{name}={shown} is expected, and no check measures it", action="leave the expectation out")
    needed = registry.level_of(check) if check != COLLECTIVES else level
    if needed <= level and check not in left_out:
        return None
    if needed <= level:
        reason = f"{name}={shown} is expected, and {check}, which measures it, was left out"
        return error(reason, action=f"run {check}, or leave the expectation out")
    reason = f"{name}={shown} is expected, and {check}, which measures it, was not run at level {level}"
    return error(reason, action=f"run `trainmaster check --level {needed}`, or leave the expectation out")
