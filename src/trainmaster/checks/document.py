"""A whole run of the checks on one node: as a NodeHealth, and as the plain document that `--json` prints.

The document is the NodeHealth's own fields, plus what follows from them (overall, exit_code, host, each result's
verdict). Who reads it back (`parse`) judges those again and never believes them.
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
    on_result: Callable[[CheckResult], None] | None = None,
) -> NodeHealth:
    """Run the checks on a machine and keep everything that was planned, found and asked for."""
    started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    planned = checks.plan(level, only, skip)
    results = clean(checks.run(host, expect, level=level, only=only, skip=skip, on_result=on_result))
    return NodeHealth(
        node=node or name_of(host) or "",
        level=level,
        planned=tuple(planned),
        results=results,
        expect=stated(expect),
        profile=profile or profiles.model_of(results),
        started_at=started_at,
        took_s=round(time.monotonic() - started, 3),
        version=__version__,
    )


def document(health: NodeHealth, *, strict: bool = False, nagios: bool = False) -> dict[str, Any]:
    """Everything about a node's run as plain data: overall, exit code, every finding."""
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
    """A NodeHealth from the document a node printed. SpecError where it is damaged, whatever it is."""
    try:
        plain = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as wrong:
        raise SpecError([Fault(path="", message=f"it is no JSON: {str(wrong)[:100]}")]) from None
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
    """The same findings without what is no text or no number: a finding quotes what a sick machine printed."""
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
                )
                for finding in result.findings
            ),
        )
        for result in results
    )


def stated(expect: Expect) -> Mapping[str, Any]:
    """What an expectation states, and nothing else."""
    return {name: value for name, value in to_plain(expect).items() if value is not None}


def count_line(health: NodeHealth) -> str:
    """`8 pass, 2 skip on host in 1.2 s`."""
    verdicts = [str(finding.verdict) for result in health.results for finding in result.findings]
    counts = [
        f"{verdicts.count(word)} {word}" for word in ("fail", "error", "warn", "pass", "skip") if word in verdicts
    ]
    return f"{', '.join(counts)} on {health.node or 'an unnamed host'} in {health.took_s:.1f} s"


def name_of(host: Host) -> str | None:
    """The machine's own name, where it tells one."""
    try:
        return host.hostname() or None
    except HostError:
        return None


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        # Escape sequences and direction marks would move the reader's cursor or turn words around.
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
