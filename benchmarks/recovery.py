"""Time from SIGKILL to the next step: of one rank, of everything, with and without recovery in place.

    PYTHONPATH=src python3 benchmarks/recovery.py                                     1B and 8B presets on a GPU
    PYTHONPATH=src python3 benchmarks/recovery.py --preset tiny --device cpu --ranks 2    tries the script itself
    PYTHONPATH=src python3 benchmarks/recovery.py --set checkpoint.memory.use=on      any field of the config
    PYTHONPATH=src python3 benchmarks/recovery.py --rivals                          on the CPU, under others too
    … --rivals --torchft-python PYTHON         and replica groups under ours and torchft (recovery_torchft.py)
    PYTHONPATH=src python3 benchmarks/recovery.py --groups --preset tiny            two replica groups on one GPU

A run is started, stopped on request (it saves) and started again, which is the start with a warm compile cache. Then
come the kills: the first rank in place; every process of the run, after which the same command is given again; and with
`recovery.in_place: false` (`--without`) the first rank once more. Parts are those of the START and RECOVERY events;
`other` is what they do not cover: the command, the agent, and for a new attempt the rest before it. The run is under
`trainmaster train` where its command line can be imported, else under the agent alone, which starts no new attempt.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recovery_rivals
import recovery_torchft

from trainmaster.agent.processes import living
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.plan import PLAN_FILE, Plan
from trainmaster.core.schema import build
from trainmaster.core.spec import JobSpec, Preflight, Resources

SHAPES = {"llama3.2-1b": 2, "llama3.1-8b": 1, "tiny": 4}  # sequences a step
PARTS = (
    "stop", "check", "fork", "imports", "device", "rendezvous", "build", "load", "compile", "first_step",
)  # fmt: skip
LIMIT_S = 240.0
STEPS_BETWEEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kill or start: seconds to the end of the next step, and the parts that the events tell."""

    what: str
    seconds: float
    parts: Mapping[str, float]


class Run:
    """A run in a folder, under one command at a time."""

    def __init__(self, folder: Path, config: Mapping[str, Any], ranks: int) -> None:
        self.folder, self.config, self.ranks = folder, dict(config), ranks
        self.command: subprocess.Popen[bytes] | None = None

    def start(self, **changes: Any) -> None:
        config = {**self.config, **changes}
        path = self.folder / "config.yaml"
        path.write_text(json.dumps(config))
        if importlib.util.find_spec("typer") is not None:
            words = ["-m", "trainmaster", "train", str(path), "--processes", str(self.ranks)]
        else:
            words = ["-m", "trainmaster.agent", str(self._plan(config))]
        self.command = subprocess.Popen([sys.executable, *words], stdout=sys.stderr, start_new_session=True)

    def _plan(self, config: Mapping[str, Any]) -> Path:
        train = build(TrainConfig, config)
        name = uuid.uuid4().hex
        folder = self.folder / "checkpoints" / "attempts" / f"{time.time_ns()}-{name[:8]}"
        folder.mkdir(parents=True)
        resources = Resources(processes_per_node=self.ranks)
        spec = JobSpec(name="bench", resources=resources, preflight=Preflight(level=0), train=train)
        checkpoints = str(self.folder / "checkpoints")
        plan = Plan(attempt=name, spec=spec, folder=str(folder), checkpoints=checkpoints, work=str(self.folder))
        (folder / PLAN_FILE).write_text(plan.to_json())
        return folder / PLAN_FILE

    def events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in sorted((self.folder / "checkpoints" / "attempts").glob("*/events.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def named(self, phase: str, event: str) -> list[dict[str, Any]]:
        return [line for line in self.events() if (line["phase"], line["event"]) == (phase, event)]

    def wait(self, phase: str, event: str, count: int) -> dict[str, Any]:
        """The event of this number, from 0."""
        end = time.monotonic() + LIMIT_S
        while len(found := self.named(phase, event)) <= count:
            if time.monotonic() > end:
                raise SystemExit(f"no {phase} {event} within {LIMIT_S:g} s; see {self.folder}")
            time.sleep(0.05)
        return found[count]

    def train_on(self) -> None:
        """A few steps more, so that every start is over before the next kill."""
        self.wait("STEP", "metrics", len(self.named("STEP", "metrics")) + STEPS_BETWEEN - 1)

    def stop(self) -> None:
        assert self.command is not None
        self.command.send_signal(signal.SIGINT)
        self.command.wait(LIMIT_S)

    def mark(self) -> str:
        plan = max((self.folder / "checkpoints" / "attempts").glob(f"*/{PLAN_FILE}"), key=os.path.getmtime)
        return str(Plan.from_json(plan.read_text()).mark)

    def rank_pid(self, rank: int) -> int:
        """The process whose output is the log of this rank."""
        for pid in living(self.mark()):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/fd/1").readlink().name == f"rank-{rank}.log":
                    return pid
        raise SystemExit(f"rank {rank} was not found")

    def kill_rank(self, rank: int = 0) -> float:
        pid, at = self.rank_pid(rank), time.time()
        os.kill(pid, signal.SIGKILL)
        return at

    def kill_all(self) -> float:
        assert self.command is not None
        pids, at = living(self.mark()), time.time()
        for pid in (self.command.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.command.wait()
        while living(self.mark()):
            time.sleep(0.01)
        return at


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=list(SHAPES), help="may be given several times")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sequence-tokens", type=int)
    parser.add_argument("--folder", help="where checkpoints go; a temporary folder if not stated")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="over the config")
    parser.add_argument("--without", action="store_true", help="also without recovery in place")
    parser.add_argument("--groups", action="store_true", help="two ranks as two replica groups, killed in turn")
    parser.add_argument("--rivals", action="store_true", help="the same kills under our agent and under others")
    parser.add_argument("--titan-python", help="with --rivals: Python of an environment with torchtitan")
    parser.add_argument("--torchft-python", help="with --rivals: Python of an environment with torchft")
    options = parser.parse_args()
    if options.rivals:
        recovery_rivals.compare(options.titan_python)
        if options.torchft_python:
            recovery_torchft.compare(options.torchft_python)
        return 0
    for preset in options.preset or ("llama3.2-1b", "llama3.1-8b"):
        with _folder(options.folder) as folder:
            config = _config(preset, options, folder)
            if options.groups:
                _measure_groups(Run(folder, config | {"recovery": {"groups": 2}}, 2), preset)
                continue
            _show(preset, list(_measure(Run(folder, config, options.ranks), without=options.without)))
    return 0


@contextlib.contextmanager
def _folder(place: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="recovery-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _measure(run: Run, *, without: bool) -> Iterator[Row]:
    yield _row(run, "first start", _started(run))
    run.train_on()
    began = time.time()
    run.stop()
    saved = run.named("CHECKPOINT", "saved")[-1]["data"]
    print(f"stopped and saved in {time.time() - began:.1f} s: {saved}", file=sys.stderr, flush=True)
    yield _row(run, "start again", _started(run))
    run.train_on()
    yield _row(run, "SIGKILL of a rank, in place", run.kill_rank)
    run.train_on()

    def kill_and_start() -> float:
        at = run.kill_all()
        run.start()
        return at

    yield _row(run, "SIGKILL of everything", kill_and_start)
    run.train_on()
    if without:
        run.kill_all()
        yield _row(run, "start again", _started(run, recovery={"in_place": False}))
        run.train_on()
        yield _row(run, "SIGKILL of a rank, new attempt", run.kill_rank)
    run.kill_all()


def _measure_groups(run: Run, preset: str) -> None:
    """The pause: to the next step of the group that is left; full strength: to the first step of both."""
    run.start()
    run.wait("START", "done", 0)
    print(f"\n{preset}, two groups\n\n| SIGKILL of rank | pause | full strength | parts |", flush=True)
    print("|---|---|---|---|", flush=True)
    for kill, rank in enumerate((1, 0, 1)):
        run.train_on()
        at = run.kill_rank(rank)
        pause, full = (run.wait("RECOVERY", name, kill) for name in ("survived", "done"))
        times = [_time(event["ts"]) - at for event in (pause, full)]
        print(f"| {rank} | {times[0]:.2f} | {times[1]:.1f} | {full['data']['parts']} |", flush=True)
    run.kill_all()


def _started(run: Run, **changes: Any) -> Callable[[], float]:
    def start() -> float:
        at = time.time()
        run.start(**changes)
        return at

    return start


def _row(run: Run, what: str, act: Callable[[], float]) -> Row:
    """Do it, and wait for the end of the next step. The event of a start comes right after its first step."""
    starts = len(run.named("START", "done"))
    at = act()
    done = run.wait("START", "done", starts)
    seconds = _time(done["ts"]) - at
    recoveries = run.named("RECOVERY", "done")
    parts = done["data"]["parts"]
    if done["data"]["restart"] and recoveries:
        parts = recoveries[-1]["data"]["parts"]
    print(f"{what}: {seconds:.1f} s {parts}", file=sys.stderr, flush=True)
    return Row(what=what, seconds=seconds, parts=parts)


def _time(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _config(preset: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape: dict[str, Any] = {"preset": preset}
    tokens = options.sequence_tokens or 8192
    if preset == "tiny":
        shape, tokens = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn_width": 128}, 64
    config: dict[str, Any] = {
        "model": shape,
        "steps": 100_000,
        "epoch_steps": 100_000,
        "batch_sequences": SHAPES[preset],
        "sequence_tokens": tokens,
        "eval_sequences": 0,
        "master": "fp32" if preset == "tiny" else "bf16",
        "device": options.device,
        "checkpoint": {"every_steps": 100_000, "keep": 1, "folder": str(folder / "checkpoints")},
    }
    for word in options.set:
        key, _, value = word.partition("=")
        *parents, name = key.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        try:
            place[name] = json.loads(value)
        except ValueError:
            place[name] = value
    return config


def _show(preset: str, rows: list[Row]) -> None:
    print(f"\n{preset}\n\n| seconds | whole | {' | '.join(PARTS)} | other |")
    print(f"|---|---|{'---|' * (len(PARTS) + 1)}")
    for row in rows:
        other = row.seconds - sum(row.parts.values())
        cells = [f"{row.parts[part]:.1f}" if part in row.parts else "" for part in PARTS]
        print(f"| {row.what} | {row.seconds:.1f} | {' | '.join(cells)} | {other:.1f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
