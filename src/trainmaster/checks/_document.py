"""A whole run of the checks as one plain document: what `--json` prints and what check.json holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from trainmaster import checks
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import CheckResult, exit_code, judge_overall
from trainmaster.core.schema import to_plain
from trainmaster.node.host import Host


def measure(
    host: Host,
    expect: Expect,
    *,
    level: int,
    only: Sequence[str],
    skip: Sequence[str],
    strict: bool = False,
    nagios: bool = False,
    on_result: Callable[[CheckResult], None] | None = None,
) -> dict[str, Any]:
    """Run the checks and say everything about it: overall, exit code, every finding."""
    started = time.monotonic()
    planned = checks.plan(level, only, skip)
    results = checks.run(host, expect, level=level, only=only, skip=skip, on_result=on_result)
    overall = judge_overall(results, planned=planned)
    return {
        "overall": str(overall),
        "exit_code": exit_code(overall, strict=strict, nagios=nagios),
        "host": _name(host),
        "level": level,
        "expect": {name: value for name, value in to_plain(expect).items() if value is not None},
        "planned": planned,
        "results": [plain_result(result) for result in results],
        "took_s": round(time.monotonic() - started, 3),
    }


def plain_result(result: CheckResult) -> dict[str, Any]:
    """One result with its verdict, which is not a field but follows from its findings."""
    return {
        "check": result.check,
        "verdict": str(result.verdict),
        "took_s": result.took_s,
        "findings": to_plain(result.findings),
    }


def count_line(document: dict[str, Any]) -> str:
    """`PASS: 8 pass, 2 skip on host in 1.2 s`."""
    verdicts = [finding["verdict"] for result in document["results"] for finding in result["findings"]]
    counts = [
        f"{verdicts.count(word)} {word}" for word in ("fail", "error", "warn", "pass", "skip") if word in verdicts
    ]
    return f"{', '.join(counts)} on {document['host'] or 'an unnamed host'} in {document['took_s']:.1f} s"


def _name(host: Host) -> str | None:
    try:
        return host.hostname()
    except HostError:
        return None
