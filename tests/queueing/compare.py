"""Rules of queues beside each other on one published workload model, in simulated time: `make queue-rules`.

    python -m queueing.compare [--jobs 1500] [--machines 16] [--load 0.9] [--seeds 2]

The workload is "continuous-multiple" of Gavel (Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for
Deep Learning Workloads", OSDI 2020, section 7.1; scheduler/utils.py of stanford-futuredata/gavel), whose sizes and
durations are fitted to Microsoft's Philly trace (Jeon et al., ATC 2019). Jobs arrive as a Poisson process; 70, 10, 15
and 5 % of them need 1, 2, 4 and 8 GPUs; one runs 10^x minutes, x uniform in [1.5, 3] for 80 % and in [3, 4] for the
others; a fifth has a high priority. What the model does not say is stated here: every job states a limit between once
and twice its run time (the f-model of Mu'alem and Feitelson, 2001, with f = 1), half of them report their steps, half
can be stopped and resumed, they belong to ten projects alike, and the GPUs of a job are on one machine of eight.

The rules. All place jobs alike: on the machine with the least room left.

- ours: docs/how/queue.md. The end of a running job is known from its steps, else it is its limit.
- fifo: in the order of arrival; a job that does not fit holds up all behind it.
- skypilot: the queue of a cluster (sky/skylet/job_lib.py, FIFOScheduler and schedule_step, 147db0f): by job id, one job
  at a time waits for its resources and the next is not tried before it has them. No priorities. This is fifo.
- dstack: jobs_submitted.py below server/background/pipeline_tasks (511c318) and docs/concepts/tasks.md: by priority,
  then in the order of arrival; a run that cannot be placed holds up none. Its pause between two tries is left out.
- easy: fifo with a reservation for the first that waits, by the stated limits, and back-fill (Lifka, 1995).

Lost GPU-hours are those that were held and led to nothing: a job that is stopped saves, which takes half a minute, and
its next start costs two more before it goes on. Nothing else stops jobs here, so rules without preemption lose none.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trainmaster.queueing.free import Free, choose
from trainmaster.queueing.schedule import schedule
from trainmaster.queueing.state import Decisions, Machine, Need, Running, Start, State, Waiting

_GPUS = 8  # of a machine
_SIZES = ((1, 0.7), (2, 0.1), (4, 0.15), (8, 0.05))
_NORMAL, _HIGH = 1, 2  # of core.config.queue.PRIORITIES
_SAVE_S, _START_S = 30.0, 120.0  # what stopping and starting again cost


@dataclass(slots=True)
class Job:
    """A job of the workload, and what became of it."""

    waiting: Waiting
    run_s: float
    says: bool  # it reports steps, from which its end is known
    preemptible: bool
    arrived_s: float
    left_s: float = 0.0
    waited_s: float = 0.0  # in the queue, also after it was stopped
    lost_s: float = 0.0
    stops: int = 0
    held: Running | None = None
    ends_s: float = 0.0


@dataclass(kw_only=True)
class Outcome:
    """What a rule made of a workload."""

    jobs: list[Job]
    gpus: int
    busy_s: float = 0.0  # GPU-seconds held while jobs arrived
    span_s: float = 0.0  # the time in which they arrived
    faults: list[str] = field(default_factory=list)


Rule = Callable[[State], Decisions]


def draw_jobs(rng: random.Random, *, count: int, machines: int, load: float) -> list[Job]:
    """The workload: so many jobs, arriving so fast that they would keep `load` of the GPUs busy."""
    each = sum(size * share for size, share in _SIZES)
    mean_s = 60 * (0.8 * _mean(1.5, 3) + 0.2 * _mean(3, 4))
    every_s = mean_s * each / (machines * _GPUS * load)
    jobs, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(1 / every_s)
        size = rng.choices([size for size, _ in _SIZES], [share for _, share in _SIZES])[0]
        run_s = 60 * 10 ** (rng.uniform(1.5, 3) if rng.random() < 0.8 else rng.uniform(3, 4))
        waiting = Waiting(
            job=f"{number:06}", project=f"p{rng.randrange(10)}", priority=_HIGH if rng.random() < 0.2 else _NORMAL,
            need=Need(nodes=1, each=size, kind="gpu"), since_s=now, longest_s=run_s * rng.uniform(1, 2),
        )  # fmt: skip
        says, stoppable = rng.random() < 0.5, rng.random() < 0.5
        jobs.append(Job(waiting=waiting, run_s=run_s, says=says, preemptible=stoppable, arrived_s=now, left_s=run_s))
    return jobs


def _mean(low: float, high: float) -> float:
    """Of 10^x with x uniform between these."""
    return float((10**high - 10**low) / ((high - low) * math.log(10)))


def run_ours(state: State) -> Decisions:
    """Our own rules."""
    return schedule(state)


def run_fifo(state: State) -> Decisions:
    """In order; the first that does not fit ends the pass."""
    return _start_in_order(state, state.waiting, blocks=True)


def run_dstack(state: State) -> Decisions:
    """By priority, then in order; whoever fits starts."""
    ordered = sorted(state.waiting, key=lambda job: (-job.priority, job.since_s))
    return _start_in_order(state, ordered, blocks=False)


def run_easy(state: State) -> Decisions:
    """Our reservation and back-fill alone: one priority, one project, nobody is stopped, ends as stated."""
    waiting = tuple(replace(job, priority=0, project="") for job in state.waiting)
    running = tuple(replace(job, priority=0, project="", preemptible=False) for job in state.running)
    return schedule(replace(state, waiting=waiting, running=running))


def _start_in_order(state: State, waiting: Sequence[Waiting], *, blocks: bool) -> Decisions:
    free, starts, unfit = Free("gpu", state.machines, state.running), [], set[int]()
    for job in waiting:
        names = choose(job.need, free.counts) if job.need.each not in unfit else None
        if names is not None:
            starts.append(Start(job=job.job, devices=free.take(names, job.need.each)))
        elif blocks:
            break
        else:
            unfit.add(job.need.each)
    return Decisions(starts=tuple(starts), preempts=(), waits=())


RULES: dict[str, tuple[Rule, bool]] = {  # with whether the ends that steps tell are known to it
    "ours": (run_ours, True), "fifo": (run_fifo, False), "skypilot": (run_fifo, False), "dstack": (run_dstack, False),
    "easy": (run_easy, False),
}  # fmt: skip


def simulate(rule: str, jobs: list[Job], *, machines: int) -> Outcome:
    """Every job until it is over."""
    decide, knows = RULES[rule]
    held = tuple(Machine(name=f"m{n}", gpus=tuple(f"{n}-{k}" for k in range(_GPUS))) for n in range(machines))
    outcome = Outcome(jobs=jobs, gpus=machines * _GPUS, span_s=jobs[-1].arrived_s)
    by_name = {job.waiting.job: job for job in jobs}
    coming = [(job.arrived_s, 0, job.waiting.job) for job in jobs]
    heapq.heapify(coming)
    waiting: dict[str, Waiting] = {}
    running: dict[str, Job] = {}
    stopping: set[str] = set()
    while coming:
        now = coming[0][0]
        while coming and coming[0][0] == now:
            _, start, name = heapq.heappop(coming)
            job = by_name[name]
            if job.held is None and start == 0:
                waiting[name] = job.waiting
            elif start == job.stops + 1 and name in running and job.ends_s <= now:
                _leave(job, outcome, now)
                del running[name]
                if name in stopping:
                    stopping.discard(name)
                    job.stops += 1
                    job.waiting = replace(job.waiting, since_s=now)
                    waiting[name] = job.waiting
        state = State(
            now_s=now, machines=held, waiting=tuple(waiting.values()),
            running=tuple(_seen(job, knows=knows, stopping=name in stopping) for name, job in running.items()),
        )  # fmt: skip
        decided = decide(state)
        taken = {gpu for job in running.values() if job.held for some in job.held.devices.values() for gpu in some}
        for begun in decided.starts:
            given = {gpu for some in begun.devices.values() for gpu in some}
            if given & taken or len(given) != by_name[begun.job].waiting.need.devices:
                outcome.faults.append(f"{begun.job} was given {sorted(given)} at {now:.0f}")
            taken |= given
            job = by_name[begun.job]
            del waiting[begun.job]
            job.waited_s += now - job.waiting.since_s
            job.held = Running(
                job=begun.job, project=job.waiting.project, priority=job.waiting.priority, kind="gpu",
                devices=begun.devices, since_s=now, preemptible=job.preemptible,
            )  # fmt: skip
            job.ends_s = now + job.left_s + (_START_S if job.stops else 0.0)
            job.lost_s += _START_S if job.stops else 0.0
            running[begun.job] = job
            heapq.heappush(coming, (job.ends_s, job.stops + 1, begun.job))
        for preempt in decided.preempts:
            job = by_name[preempt.job]
            if job.ends_s <= now + _SAVE_S:
                continue  # it is over before
            assert job.held is not None
            done = max(0.0, now - job.held.since_s - (_START_S if job.stops else 0.0))
            job.left_s -= done
            job.lost_s += _SAVE_S
            assert job.waiting.longest_s is not None
            job.waiting = replace(job.waiting, longest_s=job.waiting.longest_s - done + _START_S)
            job.ends_s = now + _SAVE_S
            stopping.add(preempt.job)
            heapq.heappush(coming, (job.ends_s, job.stops + 1, preempt.job))
    outcome.faults += [f"{name} never ran" for name in waiting]
    return outcome


def _seen(job: Job, *, knows: bool, stopping: bool) -> Running:
    """A running job as the queue sees it: what it would lose is as little for all, as all of them save when asked."""
    assert job.held is not None
    assert job.waiting.longest_s is not None
    ends_s = job.ends_s if knows and job.says else job.held.since_s + job.waiting.longest_s
    return replace(job.held, end_s=ends_s, stopping=stopping, loss=float(job.waiting.need.devices))


def _leave(job: Job, outcome: Outcome, now: float) -> None:
    """Give the GPUs back. What runs on after the last arrival does not count: nothing new competes with it."""
    assert job.held is not None
    counted = max(0.0, min(now, outcome.span_s) - job.held.since_s)
    outcome.busy_s += counted * job.waiting.need.devices
    job.held = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One row of the table."""

    rule: str
    waits_s: tuple[float, ...]  # of all that count
    high_s: tuple[float, ...]  # of those with a high priority
    large_s: tuple[float, ...]  # of those that need a whole machine
    used: float  # part of the GPUs, while jobs arrived
    lost_h: float  # GPU-hours
    stops: int


def judge(rule: str, outcomes: Sequence[Outcome]) -> Figures:
    """The figures of a rule. The first fifth of each workload finds empty machines, and is left out of the waits."""
    counted = [job for outcome in outcomes for job in outcome.jobs[len(outcome.jobs) // 5 :]]
    everyone = [job for outcome in outcomes for job in outcome.jobs]
    return Figures(
        rule=rule,
        waits_s=tuple(job.waited_s for job in counted),
        high_s=tuple(job.waited_s for job in counted if job.waiting.priority == _HIGH),
        large_s=tuple(job.waited_s for job in counted if job.waiting.need.each == _GPUS),
        used=statistics.fmean(outcome.busy_s / (outcome.span_s * outcome.gpus) for outcome in outcomes),
        lost_h=sum(job.lost_s * job.waiting.need.devices for job in everyone) / 3600,
        stops=sum(job.stops for job in everyone),
    )


def render(rows: Sequence[Figures]) -> str:
    """The table, in Markdown; waits in hours."""
    lines = [
        "| rule | wait p50 | p95 | longest | high priority p95 | 8 GPUs p95 | GPUs in use | lost GPU-hours | stopped |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        waits = [_at(row.waits_s, 0.5), _at(row.waits_s, 0.95), max(row.waits_s), _at(row.high_s, 0.95)]
        hours = " | ".join(f"{wait / 3600:.1f} h" for wait in (*waits, _at(row.large_s, 0.95)))
        lines.append(f"| {row.rule} | {hours} | {100 * row.used:.1f} % | {row.lost_h:.1f} | {row.stops} |")
    return "\n".join(lines)


def _at(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else math.nan


def main(words: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=1500)
    options.add_argument("--machines", type=int, default=16)
    options.add_argument("--load", type=float, default=0.9, help="GPU-hours that arrive, of those there are")
    options.add_argument("--seeds", type=int, default=2)
    chosen = options.parse_args(words)
    rows, faults = [], []
    for rule in RULES:
        outcomes = []
        for seed in range(chosen.seeds):
            jobs = draw_jobs(random.Random(seed), count=chosen.jobs, machines=chosen.machines, load=chosen.load)
            outcomes.append(simulate(rule, jobs, machines=chosen.machines))
        faults += [f"{rule}: {fault}" for outcome in outcomes for fault in outcome.faults]
        rows.append(judge(rule, outcomes))
    print(
        f"{chosen.seeds} × {chosen.jobs} jobs, {chosen.machines} machines of {_GPUS} GPUs, load {chosen.load:g}\n\n"
        f"{render(rows)}"
    )
    print("\n".join(faults[:20]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
