"""`python -m trainmaster.bench.collectives`: the same run on a node that has torch and nothing else. Prints JSON.

One line per finished size, then the report as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from trainmaster.bench.collectives.run_sweep import document, run_sweep, save
from trainmaster.bench.collectives.sweep import Sweep, parse_collectives
from trainmaster.bench.collectives.transport import parse_expected
from trainmaster.bench.limits import parse_size
from trainmaster.core import schema
from trainmaster.core.errors import TrainmasterError


def main() -> int:
    options = _options()
    sweep = Sweep(
        collectives=parse_collectives(options.collective),
        min_bytes=parse_size(options.min),
        max_bytes=parse_size(options.max) if options.max else None,
        factor=options.factor,
        backend=options.backend,
        processes=options.processes,
        timeout_s=options.timeout,
        start_timeout_s=options.start_timeout,
    )
    report = run_sweep(
        sweep,
        env={} if options.local else os.environ,
        out=options.out,
        expected=parse_expected(options.expect_transport),
        least_gbps=options.min_busbw,
        on_row=lambda row: _print({"row": schema.to_plain(row)}),
    )
    if isinstance(report, int):
        return report
    if options.out is not None:
        save(report, options.out)
    plain = document(report)
    _print({"report": plain})
    return int(str(plain["exit_code"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.bench.collectives", description=__doc__)
    parser.add_argument("--collective", action="append", default=[])
    # torchrun reads a --max of ours as the beginning of its own --max-restarts, and refuses it.
    parser.add_argument("--min", "--min-size", default="8K")
    parser.add_argument("--max", "--max-size")
    parser.add_argument("--factor", type=int, default=2)
    parser.add_argument("--backend", choices=("nccl", "gloo"))
    parser.add_argument("--processes", type=int)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--start-timeout", type=float, default=180.0)
    parser.add_argument("--expect-transport")
    parser.add_argument("--min-busbw", type=float)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--local", action="store_true", help="ranks of this machine alone, also inside a launcher")
    return parser.parse_args()


def _print(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        code = main()
    except TrainmasterError as error:
        sys.stderr.write(f"error {error}\n")
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a loss a thread is still in its collective, and taking the backend down would wait for it.
    os._exit(code)
