"""Seeded SIGKILL and SIGSTOP of ranks, agents, launchers and the store's host: 4 ranks on 2 nodes of this machine.

    python -m agent.recovery_chaos --kills 50 --seed 0        make chaos-recovery
    python -m agent.recovery_chaos --groups 2 --kills 50      make chaos-recovery ARGS='--groups 2'

A node is an agent with two ranks over gloo; both nodes are on this machine. The launcher starts the agents and owns
them. This program is the control plane: when an agent has ended or is lost, it ends the attempt on both nodes and
starts the next. Of a node that stands still (its processes stopped) it says so after LOST_AFTER_S.

Of each kill: the rung that followed; seconds until no rank but those struck ran (`stop`; none where it went on) and
until the next step of all four (`full`); processes that the ended attempt left (`orphans`). At the end losses and
samples are compared with those of an undisturbed run.

With `--groups` the four ranks are replica groups of one node: `stop` is then the pause of the groups that are left,
until they have made a step, and `full` until the lost one has made one with them. "two ranks" may be all groups.
Every sum over the groups that was made must have each sample of its step once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.agent.leader import free_port
from trainmaster.agent.processes import living
from trainmaster.core.plan import EVENTS_FILE, EXIT_FILE, LOCK_FILE, PLAN_FILE, Plan
from trainmaster.core.spec import parse_spec
from trainmaster.train.drill import sample_log
from trainmaster.train.drill.judge import TOLERANCE

SOURCE = str(Path(__file__).parents[2] / "src")
NODES, RANKS = 2, 4
STOP_LIMIT_S, FULL_LIMIT_S = 5.0, 20.0
BOUND = TOLERANCE / 100  # of losses with groups; without kills they are at most 3e-7 apart in 1,500 steps
STEP_S = 4.0  # longest step: a rank that stands still is found out a little earlier
LOST_AFTER_S = 5.0
WAIT_S = 300.0
VICTIMS = ("rank", "rank", "agent 0", "agent 1", "launcher", "store host")
GROUP_VICTIMS = ("rank", "rank", "rank", "rank", "two ranks", "agent 0", "launcher")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
TRAIN: dict[str, Any] = {
    "model": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 32},
    # At the default rate (3e-3) rounding of the sums over groups grows to 5% of the loss in 700 steps without any kill.
    "optimizer": {"warmup_steps": 1, "lr": 1e-4},
    "steps": 100_000, "epoch_steps": 100_000, "batch_sequences": 8, "sequence_tokens": 32, "eval_sequences": 0,
    "device": "cpu", "checkpoint": {"every_steps": 10, "lease_s": 2.0},
    "recovery": {"tries": 100},
}  # fmt: skip
_LAUNCHER = """
import os, subprocess, sys
from trainmaster.core.plan import ATTEMPT_VARIABLE, OWNER_VARIABLE
from trainmaster.node.owner import name_process
env = {**os.environ, OWNER_VARIABLE: name_process()}
agents = [
    subprocess.Popen([sys.executable, "-m", "trainmaster.agent", plan], env={**env, ATTEMPT_VARIABLE: mark})
    for plan, mark in zip(sys.argv[1::2], sys.argv[2::2])
]
sys.exit(max(agent.wait() for agent in agents))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill and what came of it."""

    victim: str
    how: str
    rung: str
    stop_s: float | None
    full_s: float
    orphans: int


def draw(count: int, seed: int | str, victims: Sequence[str] = VICTIMS) -> list[tuple[str, signal.Signals, float]]:
    """Victim, signal and seconds after the run is at full strength; every pair of the first two before one again."""
    dice = random.Random(seed)
    pairs: list[tuple[str, signal.Signals]] = []
    while len(pairs) < count:
        block = [(victim, number) for victim in victims for number in SIGNALS]
        dice.shuffle(block)
        pairs += block
    return [(*pair, round(dice.uniform(0.0, 1.0), 2)) for pair in pairs[:count]]


class Run:
    """One run through all its attempts."""

    def __init__(self, folder: Path, dice: random.Random, *, step_s: float, groups: int = 1) -> None:
        self.folder, self._dice, self._number, self._groups = folder, dice, 0, groups
        self._nodes = NODES if groups == 1 else 1
        recovery = {**TRAIN["recovery"], "groups": groups}
        self._train = {**TRAIN, "timeouts": {"step_s": step_s}, "recovery": recovery}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._plans: list[Plan] = []

    def start(self, **env: str) -> None:
        """Start the next attempt."""
        self._number += 1
        port, spec = free_port("127.0.0.1"), parse_spec(
            {
                "name": "chaos", "train": self._train, "preflight": {"level": 0}, "limits": {"grace_s": 60},
                "resources": {"nodes": self._nodes, "processes_per_node": RANKS // self._nodes},
            }
        )  # fmt: skip
        self._plans = [
            Plan(
                attempt=f"{self.folder.name}.{self._number}", spec=spec, checkpoints=str(self.folder / "checkpoints"),
                folder=str(self.folder / "attempts" / f"{self._number}-{node}"), node_rank=node, master_port=port,
            )
            for node in range(self._nodes)
        ]  # fmt: skip
        paths = [Path(plan.folder) / PLAN_FILE for plan in self._plans]
        for path, plan in zip(paths, self._plans, strict=True):
            path.parent.mkdir(parents=True)
            path.write_text(plan.to_json())
        witness = {sample_log.WITNESS_VARIABLE: str(self.folder / "samples" / str(self._number))}
        named = [word for path, plan in zip(paths, self._plans, strict=True) for word in (str(path), plan.mark)]
        self._launcher = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, *named],
            env={**os.environ, "PYTHONPATH": SOURCE, **witness, **env},
            stderr=subprocess.DEVNULL,
        )

    def strike(self, victim: str, number: signal.Signals, later_s: float) -> Kill:
        """Strike once, and see the run back at full strength."""
        self.wait(self.starts, "full strength")
        time.sleep(later_s)
        ranks = self.wait(lambda: len(found := self.ranks()) == RANKS and found, "all ranks")
        starts, survived = self.starts(), self.survived()
        struck = self._find(victim)
        ended, orphans, steps = False, 0, self.count_steps()
        stopped: list[float] = []
        paused_s: float | None = None
        # Beside this loop: it starts programs that end the attempt, and these take seconds.
        watching = threading.Thread(
            target=self._watch_ranks, args=([pid for pid in ranks if pid not in struck], stopped), daemon=True
        )
        since = time.monotonic()
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        harmless = number == signal.SIGSTOP and victim in ("agent 0", "agent 1", "launcher")
        if not harmless:
            watching.start()
        while True:
            assert time.monotonic() - since < WAIT_S, f"{victim} {number.name}: the run does not come back"
            now = time.monotonic()
            still = number == signal.SIGSTOP and victim == "store host" and now - since > LOST_AFTER_S
            if not ended and not harmless and (still or self._is_over()):
                orphans += self._release()
                ended = True
                self.start()
            if paused_s is None and self.survived() > survived:
                paused_s = time.monotonic() - since
            if harmless and self.count_steps() > steps + 5:
                break
            if not harmless and self.starts() > (0 if ended else starts):
                break
            time.sleep(0.02)
        full_s = time.monotonic() - since
        if harmless:
            for pid in struck:
                os.kill(pid, signal.SIGCONT)
        rung = "goes on" if harmless else "new attempt" if ended else "group" if paused_s is not None else "in place"
        stop_s = paused_s if rung == "group" else stopped[0] - since if stopped else None
        return Kill(victim=victim, how=number.name, rung=rung, stop_s=stop_s, full_s=full_s, orphans=orphans)

    def _watch_ranks(self, ranks: Sequence[int], stopped: list[float]) -> None:
        """Note when none of these ranks, which were not struck, runs any more."""
        while self.living(ranks):
            time.sleep(0.02)
        stopped.append(time.monotonic())

    def finish(self) -> int:
        """Have the run save and end; the processes that it left."""
        assert self._launcher is not None
        self.wait(self.starts, "full strength")
        for plan in self._plans:
            (Path(plan.folder) / "stop").write_text("user_cancelled: over\n")
        self.wait(lambda: all((Path(plan.folder) / EXIT_FILE).exists() for plan in self._plans), "the end")
        self._launcher.wait()
        return self._release()

    def starts(self) -> int:
        """Starts of this attempt that have made their first step, of all ranks or of a group that comes back."""
        items = read(self._events)
        whole = sum((item["phase"], item["event"]) == ("START", "done") for item in items)
        return whole + sum(item["event"] == "done" and item["data"].get("how") == "group" for item in items)

    def survived(self) -> int:
        """Losses that other groups have made a step after."""
        return sum((item["phase"], item["event"]) == ("RECOVERY", "survived") for item in read(self._events))

    def count_steps(self) -> int:
        return sum(item["phase"] == "STEP" for item in read(self._events))

    def ranks(self) -> list[int]:
        return [pid for plan in self._plans for pid in living(plan.mark) if _is_rank(pid)]

    @staticmethod
    def living(pids: Sequence[int]) -> list[int]:
        return [pid for pid in pids if _state(pid) not in (None, "Z", "X")]

    def wait(self, what: Callable[[], Any], name: str) -> Any:
        end = time.monotonic() + WAIT_S
        while not (value := what()):
            assert time.monotonic() < end, f"waited in vain for {name}: {self.describe()}"
            time.sleep(0.02)
        return value

    def describe(self) -> str:
        logs = [Path(plan.folder) / "agent.log" for plan in self._plans]
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in logs if path.exists())

    @property
    def _events(self) -> Path:
        return Path(self._plans[0].folder) / EVENTS_FILE

    def _find(self, victim: str) -> list[int]:
        """Processes to strike."""
        assert self._launcher is not None
        if victim == "launcher":
            return [self._launcher.pid]
        if victim == "rank":
            return [self._dice.choice(sorted(self.ranks()))]
        if victim == "two ranks":
            return self._dice.sample(sorted(self.ranks()), 2)
        if victim == "store host":  # node 0 with all it runs; its guard too, as a machine that is switched off
            return sorted(living(self._plans[0].mark))
        return [self._agent(int(victim[-1]))]

    def _agent(self, node: int) -> int:
        return int((Path(self._plans[node].folder) / LOCK_FILE).read_text().removeprefix("pid "))

    def _is_over(self) -> bool:
        """What a target would say: an agent has failed, or is gone."""
        return any(_state(self._agent(node)) in (None, "Z", "X") for node in range(self._nodes))

    def _release(self) -> int:
        """End the attempt on every node at once, as a target does; the processes that are left after that."""
        words = [sys.executable, "-m", "trainmaster.agent", "--kill"]
        env = {**os.environ, "PYTHONPATH": SOURCE}
        ending = [subprocess.Popen([*words, str(Path(plan.folder) / PLAN_FILE)], env=env) for plan in self._plans]
        assert [one.wait() for one in ending] == [0] * len(ending)
        assert self._launcher is not None
        with contextlib.suppress(ProcessLookupError):
            self._launcher.kill()
        self._launcher.wait()
        return sum(len(living(plan.mark)) for plan in self._plans)


def read(path: Path) -> list[dict[str, Any]]:
    """Whole lines of an event file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def compare_groups(struck: Path, whole: Path) -> list[str]:
    """The same with replica groups: losses within BOUND, and each sum of a step with each sample once."""
    expected = {data["step"]: data["loss"] for data in _steps(whole)}
    faults = [
        f"step {data['step']}: loss {data['loss']}, not {expected[data['step']]}"
        for data in _steps(struck)
        if abs(data["loss"] - expected[data["step"]]) > BOUND * abs(expected[data["step"]])
    ]
    (samples,) = (sample_log.read(path) for path in (whole / "samples").iterdir())
    made = set()
    for attempt in (struck / "samples").iterdir():
        for (step, epoch), rows in sample_log.read_groups(attempt).items():
            made.add(step)
            if rows != samples[step]:
                faults.append(f"attempt {attempt.name} epoch {epoch} step {step}: samples are lost, doubled or others")
    last = max(data["step"] for data in _steps(struck))
    return [*faults, *(f"step {step} was never made" for step in range(1, last + 1) if step not in made)]


def compare(struck: Path, whole: Path) -> list[str]:
    """How the run differs from the undisturbed one: losses, samples, seeds; empty if it does not."""
    faults = []
    expected = {data["step"]: data["loss"] for data in _steps(whole)}
    told: dict[int, set[float]] = {}
    for data in _steps(struck):
        told.setdefault(data["step"], set()).add(data["loss"])
    faults += [
        f"step {step}: loss {told[step]}, not {expected.get(step)}" for step in told if told[step] != {expected[step]}
    ]
    (samples,) = (sample_log.read(path) for path in (whole / "samples").iterdir())
    seen: dict[int, set[int]] = {}
    for folder in [path for path in (struck / "samples").rglob("*") if path.is_dir()]:
        for step, numbers in sample_log.read(folder).items():
            faults += [f"step {step}: sample {n} is another" for n, d in numbers.items() if samples[step].get(n) != d]
            seen.setdefault(step, set()).update(numbers)
    last = max(told)
    faults += [f"step {step} was never made" for step in range(1, last + 1) if seen.get(step) != set(samples[step])]
    return faults


def _steps(folder: Path) -> Iterator[dict[str, Any]]:
    for path in (folder / "attempts").glob(f"*-0/{EVENTS_FILE}"):
        yield from (item["data"] for item in read(path) if item["phase"] == "STEP")


def run(
    folder: Path,
    kills: Sequence[tuple[str, signal.Signals, float]],
    *,
    seed: int | str,
    step_s: float = STEP_S,
    groups: int = 1,
) -> tuple[list[Kill], list[str]]:
    """Strike a run so often; what came of each, and how the run differs from an undisturbed one without groups."""
    struck = Run(folder / "struck", random.Random(seed), step_s=step_s, groups=groups)
    whole = Run(folder / "whole", random.Random(seed), step_s=step_s)
    done: list[Kill] = []
    try:
        struck.start()
        for kill in kills:
            done.append(struck.strike(*kill))
            print(_row(len(done), done[-1]), flush=True)
        left = struck.finish()
        last = max(data["step"] for data in _steps(struck.folder))
        whole.start(TRAINMASTER_TERM_AT=f"step:start @{last + 1}")
        whole.wait(
            lambda: all((Path(plan.folder) / EXIT_FILE).exists() for plan in whole._plans), "the undisturbed run"
        )
        left += whole._release()
    finally:
        for one in (struck, whole):
            if one._plans:
                one._release()
    faults = (compare if groups == 1 else compare_groups)(struck.folder, whole.folder)
    return done, [*faults, *([f"{left} processes were left at the end"] if left else [])]


def _row(number: int, kill: Kill) -> str:
    stop = "–" if kill.stop_s is None else f"{kill.stop_s:.1f}"
    return f"| {number} | {kill.victim} | {kill.how} | {kill.rung} | {stop} | {kill.full_s:.1f} | {kill.orphans} |"


def _is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _state(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=1, choices=(1, 2, 4), help="replica groups of one node")
    args = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| kill | victim | signal | rung | stop s | full s | orphans |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        victims = VICTIMS if args.groups == 1 else GROUP_VICTIMS
        done, faults = run(Path(folder), draw(args.kills, args.seed, victims), seed=args.seed, groups=args.groups)
    stops, fulls = [kill.stop_s for kill in done if kill.stop_s is not None], [kill.full_s for kill in done]
    slow = sum(stop > STOP_LIMIT_S for stop in stops), sum(full > FULL_LIMIT_S for full in fulls)
    paused = [kill.stop_s for kill in done if kill.rung == "group" and kill.stop_s is not None]
    if args.groups > 1:
        print(f"{len(paused)} groups lost; the others paused for at most {max(paused, default=0.0):.1f} s")
    print(f"ranks stopped in at most {max(stops, default=0.0):.1f} s ({slow[0]} over {STOP_LIMIT_S:g} s)")
    print(f"full strength in at most {max(fulls):.1f} s ({slow[1]} over {FULL_LIMIT_S:g} s)")
    print(f"orphans: {sum(kill.orphans for kill in done)}; load at the end: {os.getloadavg()[0]:.1f}")
    print("\n".join(faults) or "losses and samples are those of an undisturbed run")
    return 1 if faults or any(kill.orphans for kill in done) else 0


if __name__ == "__main__":
    sys.exit(main())
