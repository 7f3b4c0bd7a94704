"""`python -m trainmaster.checks`: the checks on a machine that has Python and nothing else.

The same as `trainmaster check`, without colours: for nodes on which the command line's packages are not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trainmaster.checks import LEVELS, _document
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.expect import parse_expect
from trainmaster.node.recorded import open_host


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    try:
        document = _document.measure(
            open_host(replay=options.replay, capture=options.capture),
            parse_expect(options.expect),
            level=options.level,
            only=options.only,
            skip=options.skip,
            strict=options.strict,
            nagios=options.nagios,
        )
    except TrainmasterError as wrong:
        sys.stderr.write(f"error: {wrong}\n")
        return wrong.exit_code
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if options.json else _render(document))
    return int(document["exit_code"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.checks", description="Check this machine.")
    parser.add_argument("--level", type=int, choices=LEVELS, default=1, help="1 passive, 2 uses the GPU, 3 stress")
    parser.add_argument("--expect", action="append", default=[], metavar="NAME=VALUE", help="for example gpus=8")
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="run only this check")
    parser.add_argument("--skip", action="append", default=[], metavar="CHECK", help="leave this check out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="WARN ends with 1")
    parser.add_argument("--nagios", action="store_true", help="end with 0, 1, 2 or 3 as Nagios reads them")
    parser.add_argument("--capture", type=Path, metavar="DIR", help="write down everything that was read")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="judge a captured machine instead of this one")
    return parser


def _render(document: dict[str, Any]) -> str:
    lines = []
    for result in document["results"]:
        for finding in result["findings"]:
            name = " ".join(filter(None, (result["check"], finding["device"])))
            action = f" -> {finding['action']}" if finding["action"] else ""
            lines.append(f"{finding['verdict']:5}  {name:24} {finding['reason']}{action}")
    lines.append(f"{document['overall']}: {_document.count_line(document)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
