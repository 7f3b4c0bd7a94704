"""`python -m trainmaster.checks`: the checks with the standard library alone.

The same as `trainmaster check`, without colours, for nodes without the packages of the command line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainmaster import checks
from trainmaster.checks import LEVELS, profiles
from trainmaster.checks import document as _document
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.health import NodeHealth
from trainmaster.core.results import CheckResult, demand
from trainmaster.node.recorded import open_host


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    try:
        host = open_host(replay=options.replay, capture=options.capture)
        wanted: list[str | Mapping[str, object]] = [*options.expect]
        if options.expect_json:
            wanted.append(profiles.parse_document(json.loads(options.expect_json)))
        known = profiles.resolve(wanted, host)
        checks.plan(options.level, options.require)  # a name that is wrong, or of a higher level, is refused
        health = _document.measure(
            host,
            known.expect,
            profile=known.profile,
            level=options.level,
            only=options.only,
            skip=options.skip,
            node=options.node,
            alone=options.node is None and not options.only,
            on_result=_Progress(checks.plan(options.level, options.only, options.skip)) if options.progress else None,
        )
    except TrainmasterError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if options.strict or options.require:
        health = replace(health, results=demand(health.results, None if options.strict else options.require))
    document = _document.document(health, strict=options.strict, nagios=options.nagios)
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if options.json else _render(health))
    return int(document["exit_code"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.checks", description="Check this machine.")
    parser.add_argument("--level", type=int, choices=LEVELS, default=1, help="1 passive, 2 uses the GPU, 3 stress")
    parser.add_argument(
        "--expect", action="append", default=[], metavar="WORD", help="gpus=8, or a profile: ml.p5.48xlarge, H200"
    )
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="run only this check")
    parser.add_argument("--skip", action="append", default=[], metavar="CHECK", help="leave this check out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="WARN ends with 1, unseen faults with 3")
    parser.add_argument(
        "--require", action="append", default=[], metavar="CHECK", help="faults that it leaves unseen end with 3"
    )
    parser.add_argument("--nagios", action="store_true", help="end with 0, 1, 2 or 3 as Nagios reads them")
    parser.add_argument("--capture", type=Path, metavar="DIR", help="write everything that was read to this folder")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="judge a captured machine instead of this one")
    # Options for remote/bootstrap.py, which starts this module on remote nodes.
    parser.add_argument("--expect-json", metavar="TEXT", help="the whole expectation as one JSON object")
    parser.add_argument("--node", metavar="NAME", help="name of this node in the results")
    parser.add_argument("--progress", action="store_true", help="print the running check to standard error")
    return parser


class _Progress:
    """Print the running check to standard error, so that an interrupted run shows where it hung."""

    def __init__(self, planned: list[str]) -> None:
        self._pending = list(planned)
        self._print()

    def __call__(self, result: CheckResult) -> None:
        self._pending.remove(result.check)
        self._print()

    def _print(self) -> None:
        sys.stderr.write(f"check {self._pending[0] if self._pending else 'verdict'}\n")
        sys.stderr.flush()


def _render(health: NodeHealth) -> str:
    lines = []
    for result in health.results:
        for finding in result.findings:
            name = " ".join(filter(None, (result.check, finding.device)))
            action = f" -> {finding.action}" if finding.action else ""
            lines.append(f"{finding.verdict:5}  {name:24} {finding.reason}{action}")
    lines.append(f"{health.overall}: {_document.count_line(health)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
