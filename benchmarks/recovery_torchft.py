"""The same kills of replica groups under our `recovery: groups` and under torchft, on the CPU.

    PYTHONPATH=src python3 benchmarks/recovery_torchft.py --python PYTHON
    PYTHONPATH=src python3 benchmarks/recovery.py --rivals --torchft-python PYTHON     after the table of --rivals

PYTHON is that of an environment of its own with torchft and torchdata, which can share this one's torch:

    python3 -m venv ENV && echo SITE-PACKAGES-OF-THIS > ENV/lib/python3.11/site-packages/shared.pth
    ENV/bin/pip install --no-deps torchft-nightly torchdata …     and what an `import torchft` there still misses

Not torchft 0.2.0: there an assertion of its DistributedDataParallel ends the group that is left, when gloo says that
the other is gone. A nightly has that mended; 2026.10.26 was tried.

Two groups of one rank over gloo train one model on the same samples in the same steps; a rank is killed with SIGKILL
when the run has made a step of KILLS and has both groups. torchft runs as its README and its train_ddp example have
it: a lighthouse, and a `torchrun --max-restarts=10` for each group that starts its rank again
(recovery_torchft_rank.py). Beside them are two ranks without groups, where all ranks begin again from a checkpoint.

Pause: seconds from SIGKILL to the next step of whoever is left. Full: to the first step that has the samples of both.
In vain: steps of a group that were computed and came into no update. Skipped: samples of the undisturbed run that came
into no update though later ones of their group did. Not reached: those that come after the last of their group: a run
of more steps would have them. Doubled: those that came into more than one update. Held-out loss: of the last weights,
on the same samples. Run: seconds from the end of the first step to that of the last. Load: average of a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recovery_rivals as rivals

from trainmaster.agent.leader import free_port
from trainmaster.agent.processes import kill_all, living
from trainmaster.core.plan import ATTEMPT_VARIABLE
from trainmaster.train.drill import sample_log

HERE = Path(__file__).parent
GROUPS, STEPS, BATCH = 2, 320, 16
KILLS = ((30, 1), (150, 0))  # a step, and the group that is killed after it
CONFIG: Mapping[str, Any] = {
    "model": {"layers": 3, "width": 96, "heads": 4, "kv_heads": 2, "ffn_width": 256}, "steps": STEPS,
    "epoch_steps": STEPS, "batch_sequences": BATCH, "sequence_tokens": 128, "eval_sequences": 32, "device": "cpu",
    "precision": "fp32", "checkpoint": {"every_steps": 20, "mode": "sync", "lease_s": 2.0},
}  # fmt: skip
# As the README of torchft 0.2.0 starts it; the heartbeat's limit is the default.
LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000")
HEARTBEAT_MS = 5000
_LOOK_S = 0.2  # times are those of events: more looks would only take the cores from the runs
_Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run at its end."""

    pauses_s: Sequence[float]
    fulls_s: Sequence[float]
    vain: int
    trained: Counter[int]  # how often each sample came into an update that counts
    loss: float
    held_out: float
    seconds: float  # from the end of the first step to that of the last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with torchft")
    compare(parser.parse_args().python)
    return 0


def compare(python: str) -> None:
    """Run all of them, and print the table."""
    rivals.RANKS, rivals.STEPS, rivals.CONFIG, rivals.KILLS = GROUPS, STEPS, CONFIG, KILLS
    grouped = {**CONFIG, "recovery": {"groups": GROUPS}}
    print(f"\n{_versions(python)}, {os.cpu_count()} cores")
    columns = (
        "pause s",
        "full s",
        "in vain",
        "samples skipped",
        "not reached",
        "doubled",
        "last loss",
        "held-out loss",
        "run s",
        "load",
    )
    print(f"| under | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}", flush=True)
    _show("torchft", _run_torchft(python, kills=KILLS))
    _show("our groups", _run_ours("groups", rivals._agent, grouped, kills=KILLS))
    _show("our agent in place, without groups", _run_ours("agent", rivals._agent, CONFIG, kills=KILLS))
    _show("torchrun --max-restarts=2, our trainer", _run_ours("torchrun", rivals._torchrun, CONFIG, kills=KILLS))
    _show("torchft, position of the data not kept", _run_torchft(python, kills=KILLS, keeps_data=False))
    _show("torchft, undisturbed", _run_torchft(python, kills=()))
    _show("our groups, undisturbed", _run_ours("groups", rivals._agent, grouped, kills=()))
    _show("torchft, heartbeat_timeout_ms=1000", _run_torchft(python, kills=KILLS, heartbeat_ms=1000))


def _show(name: str, ran: Ran) -> None:
    lost = [number for number in range(STEPS * BATCH) if number not in ran.trained]
    ends = [max(number for number in ran.trained if number % GROUPS == group) for group in range(GROUPS)]
    skipped = sum(number < ends[number % GROUPS] for number in lost)
    doubled = sum(count - 1 for count in ran.trained.values())
    pauses, fulls = (", ".join(f"{value:.1f}" for value in row) or "–" for row in (ran.pauses_s, ran.fulls_s))
    samples, losses = f"{skipped} | {len(lost) - skipped} | {doubled}", f"{ran.loss:.4f} | {ran.held_out:.4f}"
    end = f"{ran.seconds:.0f} | {os.getloadavg()[0]:.0f}"
    print(f"| {name} | {pauses} | {fulls} | {ran.vain} | {samples} | {losses} | {end} |", flush=True)


def _versions(python: str) -> str:
    program = (
        "import importlib.metadata as m\n"
        "for d in m.distributions():\n"
        "    if d.name in ('torch', 'torchft', 'torchft-nightly', 'torchft_nightly'): print(d.name, d.version)"
    )
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout
    return ", ".join(sorted(said.splitlines()))


# Ours.


def _run_ours(
    name: str, start: Callable[[Path, str], list[str]], config: Mapping[str, Any], *, kills: Sequence[tuple[int, int]]
) -> Ran:
    rivals.CONFIG = config
    groups = "recovery" in config
    with rivals.started(name, start) as (folder, mark, command):
        times: list[tuple[float, float]] = []
        for step, rank in kills:
            if groups:
                times.append(_strike_group(folder, mark, step, rank, done=len(times)))
            else:
                stop = rivals._strike(folder, mark, step, rank)
                times.append((stop, stop))
        rivals.finish(name, command)
        steps = [(event["data"]["step"], rivals._time(event), event["data"]["loss"]) for event in rivals._steps(folder)]
        trained, vain = (_read_groups if groups else _read_whole)(folder / "samples")
        return Ran(
            pauses_s=[pause for pause, _ in times],
            fulls_s=[full for _, full in times],
            vain=vain,
            trained=trained,
            loss=steps[-1][2],
            held_out=_named(folder, "EVAL_MODEL", "metrics")[-1]["data"]["loss"],
            seconds=steps[-1][1] - steps[0][1],
        )


def _strike_group(folder: Path, mark: str, step: int, rank: int, *, done: int) -> tuple[float, float]:
    """Kill the rank of a group once the run has made a step at full strength; pause and time to full strength."""
    rivals._wait(lambda: any(event["data"]["step"] >= step for event in rivals._steps(folder)), pause_s=_LOOK_S)
    pid = next(pid for pid in living(mark) if rivals._rank_of(pid) == rank)
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    rivals._wait(lambda: len(_named(folder, "RECOVERY", "done")) > done, pause_s=_LOOK_S)
    events = [_named(folder, "RECOVERY", name)[done] for name in ("survived", "done")]
    pause, full = (rivals._time(event) - at for event in events)
    return pause, full


def _named(folder: Path, phase: str, event: str) -> list[_Line]:
    return [line for line in rivals._events(folder) if (line["phase"], line["event"]) == (phase, event)]


def _read_groups(samples: Path) -> tuple[Counter[int], int]:
    """Samples of the sums that were made, of a step the last one; and how many sums were not made, or not the last."""
    sums = sample_log.read_groups(samples)
    last = {step: (step, epoch) for step, epoch in sorted(sums)}
    begun = {(line["step"], line["epoch"]) for line in sample_log._lines(samples.rglob("rank-*.jsonl"))}
    trained: Counter[int] = Counter()
    for key in last.values():  # two groups that took the same sample are told by a + between its digests
        trained.update({n: digest.count("+") + 1 for n, digest in sums[key].items()})
    return trained, len(begun) - len(last)


def _read_whole(samples: Path) -> tuple[Counter[int], int]:
    """Without groups: a step that was made again began from a state that did not have it."""
    given = rivals._count_samples(samples)
    times: dict[int, int] = {}
    for (step, _, _), count in given.items():
        times[step] = max(times.get(step, 1), count)
    return Counter(number for _, number, _ in given), sum(times.values()) - len(times)


# torchft.


def _run_torchft(
    python: str, *, kills: Sequence[tuple[int, int]], keeps_data: bool = True, heartbeat_ms: int = HEARTBEAT_MS
) -> Ran:
    with tempfile.TemporaryDirectory(prefix="rival-torchft-") as place:
        folder, mark = Path(place), f"torchft-{os.getpid()}"
        (folder / "config.json").write_text(json.dumps(CONFIG))
        port, words = (
            free_port("127.0.0.1"),
            [python, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"],
        )
        env = {
            **os.environ, ATTEMPT_VARIABLE: mark, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "NUM_REPLICA_GROUPS": str(GROUPS),
            "KEEP_DATA": str(int(keeps_data)),
        }  # fmt: skip
        limits = [*LIGHTHOUSE, f"--heartbeat_timeout_ms={heartbeat_ms}"]
        commands = {
            "lighthouse": ([str(Path(python).parent / "torchft_lighthouse"), f"--bind=127.0.0.1:{port}", *limits], env)
        }
        for group in range(GROUPS):
            own = [f"--master-port={free_port('127.0.0.1')}", "--max-restarts=10"]
            command = [*words, *own, str(HERE / "recovery_torchft_rank.py"), str(folder)]
            commands[f"group {group}"] = (command, {**env, "REPLICA_GROUP_ID": str(group)})
        run: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, (command, own_env) in commands.items():
                with (folder / f"{name}.log").open("wb") as log:
                    run[name] = subprocess.Popen(command, env=own_env, stdout=log, stderr=log, start_new_session=True)
            times = [_strike_torchft(folder, step, group) for step, group in kills]
            for group in range(GROUPS):
                rivals.finish(f"group {group}", run[f"group {group}"])
            logs = _read_logs(folder)
        except SystemExit:
            for log in sorted(folder.glob("*.log")):
                print(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
            raise
        finally:
            kill_all(mark, within_s=10.0)
            for process in run.values():
                process.wait()
    return _judge(logs, times)


def _strike_torchft(folder: Path, step: int, group: int) -> tuple[float, float]:
    """As `_strike_group`."""

    def counted(which: int) -> list[_Line]:
        return [line for line in _read_logs(folder)[which] if line.get("made") and line["counts"]]

    def is_whole() -> bool:
        newest = [rows[-1] if (rows := counted(which)) else {"step": 0, "of": 0} for which in range(GROUPS)]
        return all(row["step"] >= step and row["of"] == GROUPS for row in newest)

    rivals._wait(is_whole, pause_s=_LOOK_S)
    pid = _read_logs(folder)[group][-1]["pid"]
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    alone = lambda: [line for line in counted(1 - group) if line["at"] > at and line["of"] < GROUPS]  # noqa: E731
    died = lambda: any("start" in line and line["at"] > at for line in _read_logs(folder)[1 - group])  # noqa: E731
    back = lambda: [line for line in counted(group) if line["pid"] != pid]  # noqa: E731
    rivals._wait(lambda: died() or bool(back()), pause_s=_LOOK_S)
    if died():
        raise SystemExit("torchft: the group that was left ended too, and the run began again at step 0")
    full = back()[0]["at"] - at
    pause = min([full, *(line["at"] - at for line in alone())])
    return pause, full


def _read_logs(folder: Path) -> list[list[_Line]]:
    paths = [folder / f"group-{group}.jsonl" for group in range(GROUPS)]
    return [[json.loads(text) for text in path.read_text().split("\n")[:-1]] if path.exists() else [] for path in paths]


def _judge(logs: Sequence[Iterable[_Line]], times: Sequence[tuple[float, float]]) -> Ran:
    """Which samples came into updates, by what both groups and their Managers said."""
    by_makers: list[dict[int, list[int]]] = []  # of each group: what it gave to a step that it made itself
    by_others: list[dict[int, list[list[int]]]] = []  # and to a step that it did not make, or did not live to make
    size: dict[int, int] = {}  # how many groups came into each step
    losses: dict[int, list[float]] = {}
    vain = 0
    for log in logs:
        made: dict[int, list[int]] = {}
        unmade: dict[int, list[list[int]]] = {}
        given: list[int] | None = None
        step = 0
        for line in log:
            if "start" in line and given is not None:  # killed with this batch: it was for the next step
                unmade.setdefault(step + 1, []).append(given)
                given = None
            elif "given" in line:
                given = line["given"]
            elif "made" in line:
                assert given is not None
                step = line["step"] if line["made"] else line["step"] - 1
                if line["made"]:
                    size[line["step"]] = max(size.get(line["step"], 0), line["of"])
                if line["made"] and line["counts"]:
                    made[line["step"]] = given
                    losses.setdefault(line["step"], []).append(line["loss"])
                else:
                    vain += 1
                    if line["counts"]:
                        unmade.setdefault(line["step"], []).append(given)
                given = None
        by_makers.append(made)
        by_others.append(unmade)
    trained: Counter[int] = Counter()
    for step, groups in size.items():
        parts = [made[step] for made in by_makers if step in made]
        # The Manager of another group had the sum with this one's part, though this one made no update of it.
        missing = [
            part
            for made, unmade in zip(by_makers, by_others, strict=True)
            if step not in made
            for part in unmade.get(step, [])
        ]
        parts += missing[: max(0, groups - len(parts))]
        for part in parts:
            trained.update(part)
    lines = sorted((line for log in logs for line in log), key=lambda line: line["at"])
    made_at = [line["at"] for line in lines if line.get("made")]
    return Ran(
        pauses_s=[pause for pause, _ in times],
        fulls_s=[full for _, full in times],
        vain=vain,
        trained=trained,
        loss=sum(losses[STEPS]) / len(losses[STEPS]),
        held_out=next(line["held_out"] for line in lines if "held_out" in line),
        seconds=made_at[-1] - made_at[0],
    )


if __name__ == "__main__":
    raise SystemExit(main())
