"""The same run and the same kills of ranks under our agent and under torchrun; whether torchtitan runs here.

`benchmarks/recovery.py --rivals` calls this; torchft is in recovery_torchft.py. Each run is of two ranks on the CPU and
saves every SAVE_EVERY steps; a rank is killed with SIGKILL when the run has made a step of KILLS. Stop: seconds from
SIGKILL to the end of the next step. Repeated: samples that were trained on twice, because their step was not in the
checkpoint. Lost: samples that no rank was given. The losses of all steps are compared with those of a run that was not
disturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainmaster.agent.processes import kill_all, living
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.plan import (
    ATTEMPT_VARIABLE,
    CHECKPOINTS_VARIABLE,
    EVENTS_FILE,
    EVENTS_VARIABLE,
    PLAN_FILE,
    Plan,
)
from trainmaster.core.schema import build, to_plain
from trainmaster.core.spec import JobSpec, Preflight, Resources
from trainmaster.train.drill import sample_log

RANKS, STEPS, SAVE_EVERY = 2, 400, 20
KILLS = ((90, 1), (190, 0), (290, 1))  # a step, and the rank that is killed after it
LIMIT_S = 300.0
CONFIG: Mapping[str, Any] = {
    "model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn_width": 128}, "steps": STEPS,
    "epoch_steps": STEPS, "batch_sequences": 8, "sequence_tokens": 64, "eval_sequences": 0, "device": "cpu",
    "checkpoint": {"every_steps": SAVE_EVERY, "mode": "sync", "lease_s": 2.0},
}  # fmt: skip
_Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run at its end."""

    stops_s: Sequence[float]
    losses: Mapping[int, frozenset[float]]  # of each step, every one that was told
    samples: Counter[tuple[int, int, str]]  # step, number and digest of each sample, and how often it was given


def compare(titan: str | None) -> None:
    """Run all of them, and print the table."""
    whole = run("undisturbed", _agent, kills=())
    print("| under | kills | stop s | samples repeated | samples lost | last loss | all losses equal |")
    print("|---|---|---|---|---|---|---|")
    _show("undisturbed", whole, whole)
    _show("our agent, in place", run("agent", _agent, kills=KILLS), whole)
    _show(f"torchrun --max-restarts={len(KILLS)}, our trainer", run("torchrun", _torchrun, kills=KILLS), whole)
    print(f"| torchtitan's own restart | – | not run: {_try_titan(titan)} | – | – | – | – |", flush=True)


def run(name: str, start: Callable[[Path, str], list[str]], *, kills: Sequence[tuple[int, int]]) -> Ran:
    """A whole run with these kills."""
    with started(name, start) as (folder, mark, command):
        stops = [_strike(folder, mark, step, rank) for step, rank in kills]
        finish(name, command)
        losses: dict[int, set[float]] = {}
        for event in _steps(folder):
            losses.setdefault(event["data"]["step"], set()).add(event["data"]["loss"])
        told = {step: frozenset(values) for step, values in losses.items()}
        return Ran(stops_s=stops, losses=told, samples=_count_samples(folder / "samples"))


@contextlib.contextmanager
def started(name: str, start: Callable[[Path, str], list[str]]) -> Iterator[tuple[Path, str, subprocess.Popen[bytes]]]:
    """A run in a temporary folder: the folder, the mark of its processes, its command. None is left after it."""
    with tempfile.TemporaryDirectory(prefix=f"rival-{name}-") as place:
        folder, mark = Path(place), f"{name}-{os.getpid()}"
        env = {
            **os.environ, ATTEMPT_VARIABLE: mark, EVENTS_VARIABLE: str(folder / EVENTS_FILE),
            CHECKPOINTS_VARIABLE: str(folder / "checkpoints"), "OMP_NUM_THREADS": "1",
            sample_log.WITNESS_VARIABLE: str(folder / "samples"),
        }  # fmt: skip
        command = subprocess.Popen(start(folder, mark), env=env, stdout=sys.stderr, start_new_session=True)
        try:
            yield folder, mark, command
        finally:
            kill_all(mark, within_s=10.0)
            command.wait()


def finish(name: str, command: subprocess.Popen[bytes]) -> None:
    """Wait for the run's own end."""
    if (code := command.wait(LIMIT_S)) != 0:
        raise SystemExit(f"{name}: ended with {code}")


def _agent(folder: Path, mark: str) -> list[str]:
    resources = Resources(processes_per_node=RANKS)
    spec = JobSpec(name="rival", resources=resources, preflight=Preflight(level=0), train=build(TrainConfig, CONFIG))
    plan = Plan(attempt=mark, spec=spec, folder=str(folder), checkpoints=str(folder / "checkpoints"))
    (folder / PLAN_FILE).write_text(plan.to_json())
    return [sys.executable, "-m", "trainmaster.agent", str(folder / PLAN_FILE)]


def _torchrun(folder: Path, mark: str) -> list[str]:  # noqa: ARG001 (its ranks inherit the mark)
    (folder / "config.json").write_text(json.dumps(to_plain(build(TrainConfig, CONFIG))))
    words = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={len(KILLS)}", "-m", "trainmaster.train"]
    return [sys.executable, "-m", "torch.distributed.run", *words, str(folder / "config.json")]


def _strike(folder: Path, mark: str, step: int, rank: int) -> float:
    """Kill a rank once the run has made a step; seconds until the next one."""
    _wait(lambda: any(event["data"]["step"] >= step for event in _steps(folder)))
    pid = next(pid for pid in living(mark) if _rank_of(pid) == rank)
    starts, at = len(_starts(folder)), time.time()
    os.kill(pid, signal.SIGKILL)
    _wait(lambda: len(_starts(folder)) > starts)
    since = _time(_starts(folder)[starts])
    _wait(lambda: any(_time(event) >= since for event in _steps(folder)))
    return next(_time(event) for event in _steps(folder) if _time(event) >= since) - at


def _wait(what: Callable[[], bool], *, pause_s: float = 0.02) -> None:
    end = time.monotonic() + LIMIT_S
    while not what():
        if time.monotonic() > end:
            raise SystemExit(f"nothing came within {LIMIT_S:g} s")
        time.sleep(pause_s)


def _events(folder: Path) -> Iterator[_Event]:
    with contextlib.suppress(FileNotFoundError):
        yield from map(json.loads, (folder / EVENTS_FILE).read_text().split("\n")[:-1])


def _steps(folder: Path) -> list[_Event]:
    return [event for event in _events(folder) if (event["phase"], event["event"]) == ("STEP", "metrics")]


def _starts(folder: Path) -> list[_Event]:
    return [event for event in _events(folder) if (event["phase"], event["event"]) == ("TRAINING", "start")]


def _time(event: _Event) -> float:
    return datetime.fromisoformat(str(event["ts"]).replace("Z", "+00:00")).timestamp()


def _rank_of(pid: int) -> int | None:
    """The rank that a process is, by its environment; None for another process."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
    return None


def _count_samples(folder: Path) -> Counter[tuple[int, int, str]]:
    given: Counter[tuple[int, int, str]] = Counter()
    for place in (folder, *folder.glob("restart-*")):
        given.update((step, n, digest) for step, rows in sample_log.read(place).items() for n, digest in rows.items())
    return given


def _show(name: str, ran: Ran, whole: Ran) -> None:
    lost = sum(sample not in ran.samples for sample in whole.samples)
    repeated = sum(count - 1 for count in ran.samples.values())
    stops = ", ".join(f"{stop:.1f}" for stop in ran.stops_s) or "–"
    (last,) = ran.losses[STEPS]
    equal = "yes" if ran.losses == whole.losses and set(ran.samples) == set(whole.samples) else "NO"
    print(f"| {name} | {len(ran.stops_s)} | {stops} | {repeated} | {lost} | {last:.6f} | {equal} |", flush=True)


def _try_titan(python: str | None) -> str:
    """Why torchtitan is not in the table, as it says it itself."""
    if python is None:
        return "no environment with it was named (--titan-python)"
    titan = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "torchtitan.train"]
    words = [python, *titan, "--module", "llama3", "--config", "llama3_debugmodel"]
    with tempfile.TemporaryDirectory() as folder:  # torchtitan writes into the folder it is started in
        tried = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=folder)
    if tried.returncode == 0:
        return "it runs here, and recovery_titan.py has a kill schedule for it"
    said = [line.partition("]:")[2] or line for line in tried.stderr.splitlines() if "Error" in line]
    return (said[0] if said else f"ended with {tried.returncode}").strip()[:200]
