"""`make chaos-lambda`: many jobs on simulated Lambda Cloud with every fault, the server killed every few seconds.

Afterwards no instance is left, none was launched twice, no event row is lost or doubled, no job is stuck, and each
failed job has its reason. ARGS='--jobs 20 --seed 7' runs fewer of them, drawn by another seed. After --limit-s, or
with Ctrl-C, open jobs count as stuck, are cancelled, and the verdict is given.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from .chaos import Chaos, Plan
from .verdict import judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos-lambda", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default="all", help="as of `trainmaster sim lambda`")
    parser.add_argument("--instances", type=int, default=12, help="at the same time")
    parser.add_argument("--pace", type=float, default=20.0, help="simulated seconds in one real second")
    parser.add_argument("--kill-s", type=float, nargs=2, default=(4.0, 12.0), help="between two kills of the server")
    parser.add_argument("--limit-s", type=float, default=1500.0, help="then the jobs that are open count as stuck")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-lambda-"))
    plan = Plan(
        jobs=chosen.jobs, seed=chosen.seed, faults=chosen.faults, instances=chosen.instances, pace=chosen.pace,
        kill_s=(chosen.kill_s[0], chosen.kill_s[1]), limit_s=chosen.limit_s,
        report=functools.partial(print, flush=True),
    )  # fmt: skip
    with Chaos(folder, plan) as chaos:
        for number in (signal.SIGINT, signal.SIGTERM):  # a run that is ended early has its verdict too
            signal.signal(number, lambda *_: chaos.stop())
        chaos.run()
        verdict = judge(chaos)
    print("\n".join(verdict.lines))
    if verdict.wrong:
        print(f"kept: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
