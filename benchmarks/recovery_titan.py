"""The same kills on one GPU under our agent, under torchrun with our trainer, and under torchrun with torchtitan.

    PYTHONPATH=src python3 benchmarks/recovery_titan.py --peers WHEELS

WHEELS as for drill_gpu.py, whose assets and settings of torchtitan's debug model are used: 6 layers of width 256, 16
sequences of 2,048 tokens a step, a save every SAVE_EVERY steps. Ours has the same numbers. The one rank is killed with
SIGKILL when the run has made a step of KILLS. Stop: seconds from SIGKILL to the end of the next step. Repeated: steps
that were trained more than once. The losses of all steps are compared with those of a run that was not disturbed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import drill_gpu
import recovery_rivals as rivals

from trainmaster.agent.processes import kill_all, living
from trainmaster.core.plan import ATTEMPT_VARIABLE

STEPS, SAVE_EVERY, KILLS = 120, 20, (30, 70, 110)
LIMIT_S = 240.0
_STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:\s*([\d.]+)")
OURS = {
    "model": {"layers": 6, "width": 256, "heads": 16, "kv_heads": 16, "ffn_width": 768}, "steps": STEPS,
    "epoch_steps": STEPS, "batch_sequences": 16, "sequence_tokens": 2048, "eval_sequences": 0, "deterministic": True,
    "parallel": {"compile": "off"}, "checkpoint": {"every_steps": SAVE_EVERY, "keep": 3},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run at its end: seconds from each kill to the next step, and all losses that were told of each step."""

    stops_s: Sequence[float]
    losses: Mapping[int, Sequence[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder of wheels for torchtitan")
    parser.add_argument("--titan-module", default="torchtitan.train", help="what runs in place of torchtitan's own")
    given = parser.parse_args()
    given.steps, given.torchrun = STEPS, False
    print("| under | kills | stop s | steps repeated | steps lost | last loss | all losses equal |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="tm-titan-", ignore_cleanup_errors=True) as place:
        folder = Path(place).resolve()
        path = [str(drill_gpu.HERE.parent / "src"), str(drill_gpu.HERE / "stand_in")]
        path += [str(drill_gpu._unpack(given.peers, folder / "peers"))] if given.peers else []
        titan = _run_titan(folder / "whole", given, path, kills=())
        _show("torchtitan, undisturbed", titan, titan)
        struck = _run_titan(folder / "struck", given, path, kills=KILLS)
        _show(f"torchrun --max-restarts={len(KILLS)}, torchtitan", struck, titan)
    rivals.RANKS, rivals.STEPS, rivals.CONFIG = 1, STEPS, OURS
    kills = tuple((step, 0) for step in KILLS)
    rivals.KILLS = kills
    ours = _of(rivals.run("undisturbed", rivals._agent, kills=()))
    _show("our agent, undisturbed", ours, ours)
    _show("our agent, in place", _of(rivals.run("agent", rivals._agent, kills=kills)), ours)
    torchrun = _of(rivals.run("torchrun", rivals._torchrun, kills=kills))
    _show(f"torchrun --max-restarts={len(KILLS)}, our trainer", torchrun, ours)
    return 0


def _run_titan(work: Path, given: argparse.Namespace, path: Sequence[str], *, kills: Sequence[int]) -> Ran:
    """torchtitan under torchrun, killed after these steps."""
    work.mkdir()
    words = drill_gpu._titan(work, given)
    words = [word.replace("--checkpoint.interval=5", f"--checkpoint.interval={SAVE_EVERY}") for word in words[1:]]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", f"--max-restarts={len(KILLS)}"]
    mark = f"titan-{work.name}-{os.getpid()}"
    known = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {**os.environ, "PYTHONPATH": known, ATTEMPT_VARIABLE: mark, "PYTHONUNBUFFERED": "1"}
    log = work.with_suffix(".txt")
    with log.open("w") as file:
        command = subprocess.Popen(
            [sys.executable, *launcher, *words], cwd=work, env=env, stdout=file, stderr=file, start_new_session=True
        )
    try:
        stops = [_strike(log, mark, step) for step in kills]
        code = command.wait(LIMIT_S)
    finally:
        kill_all(mark, within_s=10.0)
        command.wait()
    if code != 0:
        raise SystemExit(f"torchtitan ended with {code}:\n" + "\n".join(log.read_text().splitlines()[-15:]))
    losses: dict[int, list[float]] = {}
    for step, loss in _read(log):
        losses.setdefault(step, []).append(loss)
    return Ran(stops_s=stops, losses=losses)


def _strike(log: Path, mark: str, step: int) -> float:
    rivals._wait(lambda: any(made >= step for made, _ in _read(log)))
    pid = next(pid for pid in living(mark) if rivals._rank_of(pid) == 0)
    os.kill(pid, signal.SIGKILL)
    at = time.monotonic()
    time.sleep(0.1)  # what it had written before
    told = len(_read(log))
    rivals._wait(lambda: len(_read(log)) > told)
    return time.monotonic() - at


def _read(log: Path) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in _STEP.findall(log.read_text())]


def _of(ran: rivals.Ran) -> Ran:
    """Ours, in steps: how often a step was made is told by its samples."""
    times: dict[int, int] = {}
    for (step, _, _), count in ran.samples.items():
        times[step] = max(times.get(step, 1), count)
    losses = {step: [*sorted(told)] * (times[step] if len(told) == 1 else 1) for step, told in ran.losses.items()}
    return Ran(stops_s=ran.stops_s, losses=losses)


def _show(name: str, ran: Ran, whole: Ran) -> None:
    repeated = sum(len(told) - 1 for told in ran.losses.values())
    lost = len(whole.losses.keys() - ran.losses.keys())
    stops = ", ".join(f"{stop:.1f}" for stop in ran.stops_s) or "–"
    equal = all(set(told) == set(whole.losses.get(step, ())) for step, told in ran.losses.items()) and not lost
    last = ran.losses[STEPS][-1]
    print(f"| {name} | {len(ran.stops_s)} | {stops} | {repeated} | {lost} | {last:.5f} | {'yes' if equal else 'NO'} |")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
