"""`python -m trainmaster.bench.accept`: the acceptance test on a node that has torch and nothing else.

Takes the options of `trainmaster accept`, starts one rank per GPU or takes part under a launcher, writes results.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TextIO

from trainmaster.bench.accept import run
from trainmaster.bench.accept.identity import find_info
from trainmaster.bench.accept.judge import DATA_MARK
from trainmaster.bench.accept.launch import PARENT_VARIABLE
from trainmaster.bench.accept.options import Options, option, read, table
from trainmaster.bench.accept.results import is_unjudged, refuse_folder, save, summarise
from trainmaster.core import schema
from trainmaster.core.errors import DataError, TrainmasterError
from trainmaster.core.results import Overall, exit_code
from trainmaster.node.owner import die_with_variable


def main() -> int:
    options, given = _options()
    if given.rank_of is not None:
        return _rank_of(given.rank_of)
    out: Path = given.out
    if str(out) != "-":
        refuse_folder(out)
    results = run(options, env=os.environ, show=lambda text: _print(sys.stderr, text))
    if results is None:
        return 0
    if str(out) != "-":
        save(results, out)
    _print(sys.stdout, json.dumps(results))
    sys.stdout.flush()
    _print(sys.stderr, summarise(results))
    if given.allow_unjudged and is_unjudged(results):
        return 0
    return int(results["exit_code"])


def _rank_of(folder: Path) -> int:
    """A rank of the local launcher: its options and its place are in the folder and in the environment."""
    die_with_variable(PARENT_VARIABLE)  # before torch is loaded, which takes seconds
    from trainmaster.bench.accept import rank

    options = schema.build(Options, json.loads((folder / "options.json").read_text()))
    info = find_info(os.environ)

    def show(text: str) -> None:
        with (folder / "progress").open("a") as file:
            file.write(text + "\n")

    records = rank.run(options, info, show=show if info.rank == 0 else lambda _: None)
    if info.rank == 0:
        (folder / "records.json").write_text(json.dumps([dataclasses.asdict(record) for record in records]))
    return 0


def _print(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def _options() -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.bench.accept", description=__doc__)
    for row in table():
        default = os.environ.get(row.texts.get("envvar", "")) or row.default
        parser.add_argument(
            option(row.field), type=row.kind, default=default, metavar=row.texts.get("metavar"), help=row.texts["help"]
        )
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument(
        "--allow-unjudged",
        action="store_true",
        help="end with 0 where everything ran and only a baseline is missing; results.json still says INCOMPLETE",
    )
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    return read(vars(given), os.environ), given


if __name__ == "__main__":
    try:
        code = main()
    except DataError as error:
        sys.stderr.write(f"error {DATA_MARK}{error}\n")
        code = exit_code(Overall.INCOMPLETE)
    except TrainmasterError as error:
        sys.stderr.write(f"error {error}\n")
        code = error.exit_code
    sys.exit(code)
