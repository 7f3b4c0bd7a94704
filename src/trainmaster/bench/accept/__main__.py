"""`python -m trainmaster.bench.accept`: the acceptance test on a node that has torch and nothing else.

Takes the options of `trainmaster accept`, starts one rank per GPU or takes part under a launcher, writes results.json.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from trainmaster.bench.accept import run
from trainmaster.bench.accept.launch import PARENT_VARIABLE
from trainmaster.bench.accept.options import Options, parse_fault
from trainmaster.bench.accept.results import save
from trainmaster.core import schema
from trainmaster.core.errors import TrainmasterError


def main() -> int:
    options, out, folder = _options()
    if folder is not None:
        return _rank_of(folder)
    found = run(options, env=os.environ, show=lambda text: _print(sys.stderr, text))
    if found is None:
        return 0
    save(found, out)
    _print(sys.stdout, json.dumps(found))
    return int(found["exit_code"])


def _rank_of(folder: Path) -> int:
    """A rank of the local launcher: its options and its place are in the folder and in the environment."""
    from trainmaster.bench.accept import rank
    from trainmaster.node.ranks import detect
    from trainmaster.train.parallel.rank_info import find_rank_info

    _die_with_launcher()
    options = schema.build(Options, json.loads((folder / "options.json").read_text()))
    info = find_rank_info(detect(os.environ))

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


def _die_with_launcher() -> None:
    """Have the kernel kill this process when its launcher dies. Linux only."""
    parent, prctl = os.environ.get(PARENT_VARIABLE), getattr(ctypes.CDLL(None), "prctl", None)
    if parent is None or prctl is None:
        return
    prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, linux/prctl.h
    if os.getppid() != int(parent):
        os._exit(1)


def _options() -> tuple[Options, Path, Path | None]:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.bench.accept", description=__doc__)
    plain = Options()
    for one in dataclasses.fields(Options):
        if one.name == "fault":
            continue
        value = getattr(plain, one.name)
        kind = {"processes": int, "min_throughput": float}.get(one.name, str if value is None else type(value))
        parser.add_argument(
            f"--{one.name.removesuffix('_s').replace('_', '-')}", dest=one.name, type=kind, default=value
        )
    parser.add_argument("--inject", metavar="FAULT:RANK")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    found = vars(parser.parse_args())
    out, folder, fault = found.pop("out"), found.pop("rank_of"), parse_fault(found.pop("inject"))
    return Options(**found, fault=fault), out, folder


if __name__ == "__main__":
    try:
        code = main()
    except TrainmasterError as wrong:
        sys.stderr.write(f"error {wrong}\n")
        code = wrong.exit_code
    sys.exit(code)
