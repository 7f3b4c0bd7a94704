"""Document of one node's run: a NodeHealth, and the JSON that `--json` prints.

The JSON has the fields of NodeHealth and the values derived from them (overall, exit_code, host, the verdict of each
result). `parse` drops the derived values and computes them again, so an edited document cannot claim a verdict.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from trainmaster import __version__, checks
from trainmaster.checks import profiles
from trainmaster.checks.expectations import unmeasured
from trainmaster.core.errors import Fault, HostError, SpecError
from trainmaster.core.expect import Expect
from trainmaster.core.health import NodeHealth
from trainmaster.core.results import CheckResult, exit_code
from trainmaster.core.schema import build, to_plain
from trainmaster.node.host import Host

_DERIVED = ("overall", "exit_code", "host")


def measure(
    host: Host,
    expect: Expect,
    *,
    level: int,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    node: str | None = None,
    profile: str | None = None,
    alone: bool = False,
    on_result: Callable[[CheckResult], None] | None = None,
) -> NodeHealth:
    """Run the checks on a machine; keep the plan, the findings and the expectation.

    `alone`: nothing else is run, so an expectation that only a higher level or collectives measure is an error.
    """
    started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    planned = checks.plan(level, only, skip)
    results = clean(checks.run(host, expect, level=level, only=only, skip=skip, on_result=on_result))
    left_out = tuple(name for name in checks.plan(level) if name not in planned)
    left = unmeasured(expect, level=level, left_out=left_out) if alone else ()
    planned, results = [*planned, *(result.check for result in left)], (*results, *left)
    return NodeHealth(
        node=node or name_of(host) or "",
        level=level,
        planned=tuple(planned),
        results=results,
        left_out=left_out,
        expect=stated(expect),
        profile=profile or profiles.model_of(results),
        started_at=started_at,
        took_s=round(time.monotonic() - started, 3),
        version=__version__,
    )


def document(health: NodeHealth, *, strict: bool = False, nagios: bool = False) -> dict[str, Any]:
    """Plain data of a run: overall, exit code, every finding."""
    plain = to_plain(health)
    return {
        "overall": str(health.overall),
        "exit_code": exit_code(health.overall, strict=strict, nagios=nagios),
        "host": health.node or None,
        **plain,
        "results": [
            {**fields, "verdict": str(result.verdict)}
            for fields, result in zip(plain["results"], health.results, strict=True)
        ],
    }


def parse(text: str) -> NodeHealth:
    """NodeHealth from a printed document. SpecError if it is damaged."""
    try:
        plain = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise SpecError([Fault(path="", message=f"not valid JSON: {str(error)[:100]}")]) from None
    if isinstance(plain, dict):
        plain = {name: value for name, value in plain.items() if name not in _DERIVED}
        if isinstance(plain.get("results"), list):
            plain["results"] = [
                {name: value for name, value in result.items() if name != "verdict"}
                if isinstance(result, dict)
                else result
                for result in plain["results"]
            ]
    health = build(NodeHealth, plain)
    return replace(health, results=clean(health.results))


def clean(results: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """Findings without unprintable characters and non-finite numbers: they quote what a faulty machine printed."""
    return tuple(
        replace(
            result,
            findings=tuple(
                replace(
                    finding,
                    reason=_clean(finding.reason),
                    action=_clean(finding.action),
                    device=_clean(finding.device),
                    values=_clean(finding.values),
                    proof=_clean(finding.proof),
                )
                for finding in result.findings
            ),
        )
        for result in results
    )


def stated(expect: Expect) -> Mapping[str, Any]:
    """Fields of an expectation that are stated."""
    return {name: value for name, value in to_plain(expect).items() if value is not None}


def count_line(health: NodeHealth) -> str:
    """`8 pass, 2 skip on host in 1.2 s`."""
    verdicts = [str(finding.verdict) for result in health.results for finding in result.findings]
    counts = [
        f"{verdicts.count(word)} {word}" for word in ("fail", "error", "warn", "pass", "skip") if word in verdicts
    ]
    return f"{', '.join(counts)} on {health.node or 'an unnamed host'} in {health.took_s:.1f} s"


def name_of(host: Host) -> str | None:
    """Host name of the machine; None if it has none."""
    try:
        return host.hostname() or None
    except HostError:
        return None


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        # Escape sequences and direction marks would move the cursor or reverse the text in a terminal.
        return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if isinstance(value, Mapping):
        return {str(_clean(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON number")
