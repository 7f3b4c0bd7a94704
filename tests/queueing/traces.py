"""Seeded traces of the queue in simulated time, each pass judged by the model: `make queue-traces`.

python -m queueing.traces --traces 2000 --seed 0
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, field, replace

from queueing.model import judge
from trainmaster.queueing.schedule import schedule
from trainmaster.queueing.state import Decisions, Machine, Need, Rules, Running, Share, State, Waiting

_RULES = Rules(age_s=100.0, min_run_s=10.0)
_LEVELS = 4


@dataclass
class _Job:
    waiting: Waiting
    lasts_s: float  # still to run
    says: bool  # its end is known while it runs
    preemptible: bool
    arrived_s: float
    waited_since_s: float = 0.0
    starts: int = 0
    held_s: float = 0.0  # with devices, in all
    held: Running | None = None
    ends_s: float = 0.0


@dataclass
class Trace:
    """One trace: what went wrong in it, and what happened."""

    seed: int
    faults: list[str] = field(default_factory=list)
    passes: int = 0
    starts: int = 0
    preempted: int = 0


def _machines(rng: random.Random) -> tuple[Machine, ...]:
    machines = []
    for number in range(rng.randint(1, 3)):
        gpus = tuple(f"GPU-{number}-{k}" for k in range(rng.choice((1, 2, 4))))
        slots = tuple(f"m{number}/slot-{k}" for k in range(rng.choice((0, 2, 3))))
        machines.append(Machine(name=f"m{number}", gpus=gpus, slots=slots))
    return tuple(machines)


def _jobs(rng: random.Random, machines: tuple[Machine, ...]) -> list[_Job]:
    jobs = []
    for number in range(rng.randint(3, 16)):
        arrived, lasts = rng.uniform(0, 200), rng.choice((5.0, 20.0, 60.0, 150.0))
        nodes, each = rng.choice((1, 1, 1, 2, len(machines))), rng.choice((1, 1, 2, 4))
        need = Need(nodes=nodes, each=each, kind=rng.choice(("gpu", "gpu", "slot")))
        waiting = Waiting(
            job=f"j{number}", project=rng.choice("abc"), priority=rng.randrange(_LEVELS), need=need, since_s=arrived,
            longest_s=lasts if rng.random() < 0.5 else None,
        )  # fmt: skip
        jobs.append(
            _Job(
                waiting=waiting,
                lasts_s=lasts,
                says=rng.random() < 0.6,
                preemptible=rng.random() < 0.5,
                arrived_s=arrived,
            )
        )
    return jobs


def run(seed: int) -> Trace:
    """One trace, until every job that can ever run is over."""
    rng = random.Random(seed)
    machines = _machines(rng)
    jobs = _jobs(rng, machines)
    quotas = {"a": Share(quota=rng.choice((None, 2, 4)), weight=rng.choice((1.0, 2.0)))}
    trace, over = Trace(seed=seed), set[str]()
    moments = sorted(job.arrived_s for job in jobs)
    now, stopping = 0.0, dict[str, float]()
    used = {machines[0].name: {machines[0].gpus[0]: "process 7"}} if rng.random() < 0.2 else {}
    used_until = rng.uniform(50, 400)
    while trace.passes < 5_000:
        coming = [time for time in moments if time > now]
        coming += [job.ends_s for job in jobs if job.held is not None] + list(stopping.values())
        coming += [used_until] if used and now < used_until else []
        coming += [now + _RULES.age_s] if any(job.held is None and job.arrived_s <= now for job in jobs) else []
        if not coming or len(over) == len(jobs):
            break
        now = max(now, min(coming))
        _end(jobs, stopping, over, now)
        shown = tuple(replace(m, used=used.get(m.name, {}) if now < used_until else {}) for m in machines)
        state = _state(jobs, stopping, over, shown, quotas, now, rng)
        decided = schedule(state)
        trace.passes += 1
        trace.faults += judge(state, decided)
        _apply(jobs, decided, stopping, trace, now)
        never = {wait.job for wait in decided.waits if wait.why == "never"}
        if {job.waiting.job for job in jobs} <= over | never:
            break
    left = {job.waiting.job for job in jobs} - over - never
    trace.faults += [f"{name} never ran" for name in sorted(left)]
    trace.faults += _starved(jobs, over, used_until if used else 0.0)
    return trace


def _end(jobs: list[_Job], stopping: dict[str, float], over: set[str], now: float) -> None:
    for job in jobs:
        name, held = job.waiting.job, job.held
        if held is None:
            continue
        if job.ends_s <= now:
            over.add(name)
            job.held_s += now - held.since_s
            job.held = None
            stopping.pop(name, None)
        elif name in stopping and stopping[name] <= now:  # it saved what it could, and waits again
            done = (now - held.since_s) * 0.8
            job.held_s += now - held.since_s
            job.lasts_s -= done
            job.waiting, job.held = replace(job.waiting, since_s=now), None
            del stopping[name]


def _state(
    jobs: list[_Job],
    stopping: dict[str, float],
    over: set[str],
    machines: tuple[Machine, ...],
    shares: dict[str, Share],
    now: float,
    rng: random.Random,
) -> State:
    running = [
        replace(
            job.held, stopping=job.waiting.job in stopping, end_s=job.ends_s if job.says else None,
            loss=rng.choice((None, 1.0, 5.0, 9.0)),
        )
        for job in jobs if job.held is not None
    ]  # fmt: skip
    waiting = [job.waiting for job in jobs if job.held is None and job.arrived_s <= now and job.waiting.job not in over]
    return State(
        now_s=now, machines=machines, running=tuple(running), waiting=tuple(waiting), shares=shares, rules=_RULES
    )


def _apply(jobs: list[_Job], decided: Decisions, stopping: dict[str, float], trace: Trace, now: float) -> None:
    by_name = {job.waiting.job: job for job in jobs}
    for start in decided.starts:
        job = by_name[start.job]
        job.held = Running(
            job=start.job, project=job.waiting.project, priority=job.waiting.priority, kind=job.waiting.need.kind,
            devices=start.devices, since_s=now, preemptible=job.preemptible,
        )  # fmt: skip
        job.ends_s = now + job.lasts_s
        job.starts += 1
        if job.starts == 1:
            job.waited_since_s = now - job.arrived_s
    for preempt in decided.preempts:
        stopping[preempt.job] = now + 2.0
    trace.starts += len(decided.starts)
    trace.preempted += len(decided.preempts)


def _starved(jobs: list[_Job], over: set[str], used_until: float) -> list[str]:
    """The stated bound: after levels × age_s only jobs that came before that time are ahead, and one of them runs."""
    faults = []
    for job in jobs:
        if job.waiting.job not in over:
            continue
        line = job.arrived_s + _LEVELS * _RULES.age_s
        ahead = sum(other.held_s for other in jobs if other is not job and other.arrived_s <= line)
        bound = _LEVELS * _RULES.age_s + ahead + used_until
        if job.waited_since_s > bound:
            faults.append(f"{job.waiting.job} waited {job.waited_since_s:.0f} s, bound {bound:.0f} s")
    return faults


def main(words: list[str] | None = None) -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--traces", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args(words)
    traces = [run(seed) for seed in range(chosen.seed, chosen.seed + chosen.traces)]
    broken = [trace for trace in traces if trace.faults]
    for trace in broken[:20]:
        print(f"seed {trace.seed}: {trace.faults[0]}")
    passes, starts, stops = (sum(getattr(t, name) for t in traces) for name in ("passes", "starts", "preempted"))
    print(f"{len(traces)} traces, {passes} passes, {starts} starts, {stops} preemptions: {len(broken)} broken a rule")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
