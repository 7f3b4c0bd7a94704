"""The rules of the queue, judged the slow way: every choice of machines is tried. For states of a few machines."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

from trainmaster.queueing.state import Decisions, Need, Running, State, Waiting

_FAR = 1e12  # when a job that does not say its end ends; one that is started now without an end outlasts it


def judge(state: State, decided: Decisions) -> list[str]:
    """Every rule that the decisions break."""
    waiting = {job.job: job for job in state.waiting}
    faults = [*_double_booked(state, decided), *_gangs(decided, waiting), *_quotas(state, decided, waiting)]
    answered = [start.job for start in decided.starts] + [wait.job for wait in decided.waits]
    if sorted(answered) != sorted(waiting):
        faults.append("not every waiting job has exactly one answer")
    if [wait.position for wait in decided.waits] != list(range(1, len(decided.waits) + 1)):
        faults.append("positions are not 1, 2, 3 …")
    ordered, started = order(state, decided), {start.job for start in decided.starts}
    if [name for name in ordered if name in started] != [start.job for start in decided.starts] or [
        name for name in ordered if name not in started
    ] != [wait.job for wait in decided.waits]:
        faults.append(f"the order is not {ordered}")
    faults += [*_passed_over(state, decided, waiting), *_delayed(state, decided, waiting)]
    return [*faults, *_victims(state, decided, waiting)]


def _double_booked(state: State, decided: Decisions) -> list[str]:
    known = {device: machine for machine in state.machines for device in (*machine.gpus, *machine.slots)}
    held = [device for job in state.running for devices in job.devices.values() for device in devices]
    faults = []
    for start in decided.starts:
        for name, devices in start.devices.items():
            for device in devices:
                machine = known[device]
                if machine.name != name or machine.closed or device in machine.used:
                    faults.append(f"{start.job} was given {device}, which is in use, closed or of another machine")
                held.append(device)
    return faults + [f"{device} is booked {count} times" for device, count in Counter(held).items() if count > 1]


def _gangs(decided: Decisions, waiting: dict[str, Waiting]) -> list[str]:
    return [
        f"{start.job} was given {start.devices} and needs {waiting[start.job].need}"
        for start in decided.starts
        if [len(devices) for devices in start.devices.values()]
        != [waiting[start.job].need.each] * waiting[start.job].need.nodes
    ]


def _quotas(state: State, decided: Decisions, waiting: dict[str, Waiting]) -> list[str]:
    held: Counter[tuple[str, str]] = Counter()
    for job in state.running:
        held[job.project, job.kind] += sum(map(len, job.devices.values()))
    faults = []
    for start in decided.starts:
        job = waiting[start.job]
        held[job.project, job.need.kind] += job.need.devices
        share = state.shares.get(job.project)
        if share is not None and share.quota is not None and held[job.project, job.need.kind] > share.quota:
            faults.append(f"{start.job} takes {job.project} over its quota")
    return faults


def fits(need: Need, state: State, running: list[Running]) -> bool:
    """Whether some choice of machines has room for a job beside these."""
    held = {device for job in running for devices in job.devices.values() for device in devices}
    room = [
        sum(device not in held and device not in machine.used for device in machine.devices(need.kind))
        for machine in state.machines
        if not machine.closed
    ]
    return any(min(some) >= need.each for some in itertools.combinations(room, need.nodes))


def _started(state: State, decided: Decisions, waiting: dict[str, Waiting]) -> list[Running]:
    """Jobs that were started, as running jobs, in their order. One without a limit outlasts everything."""
    jobs = []
    for start in decided.starts:
        job = waiting[start.job]
        end_s = 2 * _FAR if job.longest_s is None else state.now_s + job.longest_s
        jobs.append(
            Running(
                job=job.job, project=job.project, priority=job.priority, kind=job.need.kind, devices=start.devices,
                since_s=state.now_s, end_s=end_s,
            )
        )  # fmt: skip
    return jobs


def order(state: State, decided: Decisions) -> list[str]:
    """The order of the queue, found by asking all that are left at each place, with what was started before."""
    held = {job.project: Counter[str]() for job in (*state.running, *state.waiting)}
    for job in state.running:
        held[job.project][job.kind] += sum(map(len, job.devices.values()))
    every = {"gpu": sum(len(m.gpus) for m in state.machines), "slot": sum(len(m.slots) for m in state.machines)}
    started, left, ordered = {start.job for start in decided.starts}, list(state.waiting), []

    def rank(job: Waiting) -> tuple[float, float, float, str]:
        level = job.priority + int((state.now_s - job.since_s) / state.rules.age_s)
        parts = [held[job.project][kind] / count for kind, count in every.items() if count]
        share = state.shares.get(job.project)
        return -level, max(parts, default=0.0) / (share.weight if share else 1.0), job.since_s, job.job

    while left:
        job = min(left, key=rank)
        left.remove(job)
        ordered.append(job.job)
        if job.job in started:
            held[job.project][job.need.kind] += job.need.devices
    return ordered


def _passed_over(state: State, decided: Decisions, waiting: dict[str, Waiting]) -> list[str]:
    """A job that fits beside what was started before it may not be left waiting, unless something is reserved then."""
    started = {held.job: held for held in _started(state, decided, waiting)}
    waits = {wait.job: wait for wait in decided.waits}
    reserving: set[str] = set()
    faults, before = [], list(state.running)
    for name in order(state, decided):
        job = waiting[name]
        if name in started:
            before.append(started[name])
            continue
        if waits[name].why in ("never", "quota"):
            continue
        if job.need.kind not in reserving and fits(job.need, state, before):
            faults.append(f"{name} fits and was left waiting: {waits[name].text}")
        if waits[name].why == "first":
            reserving.add(job.need.kind)
    return faults


def _earliest(need: Need, state: State, running: list[Running]) -> float:
    def end(job: Running) -> float:
        if job.stopping:
            return state.now_s
        return _FAR if job.end_s is None else max(job.end_s, state.now_s)

    for time in sorted({state.now_s, *map(end, running)}):
        if fits(need, state, [job for job in running if end(job) > time]):
            return time
    return math.inf


def _delayed(state: State, decided: Decisions, waiting: dict[str, Waiting]) -> list[str]:
    """The reserved job starts no later than it would without the jobs that were started from behind it."""
    started = {held.job: held for held in _started(state, decided, waiting)}
    ordered, faults = order(state, decided), []
    for wait in decided.waits:
        if wait.why != "first":
            continue
        place, job = ordered.index(wait.job), waiting[wait.job]
        # A job before it without a limit is one that does not say its end, as any that runs.
        ahead = [started[name] for name in ordered[:place] if name in started]
        ahead = [replace(held, end_s=None) if held.end_s == 2 * _FAR else held for held in ahead]
        behind = [started[name] for name in ordered[place:] if name in started]
        without = _earliest(job.need, state, [*state.running, *ahead])
        with_all = _earliest(job.need, state, [*state.running, *ahead, *behind])
        if with_all > without:
            faults.append(f"{job.job} is delayed by back-filled jobs from {without} to {with_all}")
        if without != (_FAR if wait.start_s is None else wait.start_s):
            faults.append(f"{job.job} was promised {wait.start_s} and can start at {without}")
    return faults


def _victims(state: State, decided: Decisions, waiting: dict[str, Waiting]) -> list[str]:
    jobs = {job.job: job for job in state.running}
    faults: list[str] = []
    by_head: dict[str, list[Running]] = {}
    for preempt in decided.preempts:
        by_head.setdefault(preempt.by, []).append(jobs[preempt.job])
    started = _started(state, decided, waiting)
    for head, victims in by_head.items():
        job = waiting[head]

        def may(held: Running, job: Waiting = job) -> bool:
            old = state.now_s - held.since_s >= state.rules.min_run_s
            return held.preemptible and not held.stopping and held.priority < job.priority and old

        def enough(gone: list[Running], job: Waiting = job) -> bool:
            kept = [held for held in state.running if held not in gone and not held.stopping]
            return fits(job.need, state, [*kept, *started])

        def worst(gone: tuple[Running, ...] | list[Running]) -> float:
            return max((math.inf if held.loss is None else held.loss for held in gone), default=0.0)

        faults += [f"{held.job} may not be stopped for {head}" for held in victims if not may(held)]
        if not enough(victims):
            faults.append(f"stopping {len(victims)} jobs does not make room for {head}")
        if any(enough([held for held in victims if held is not spared]) for spared in victims):
            faults.append(f"more jobs are stopped for {head} than needed")
        allowed = [held for held in state.running if may(held) and held.kind == job.need.kind]
        sets = (some for size in range(len(allowed) + 1) for some in itertools.combinations(allowed, size))
        best = min((worst(some) for some in sets if enough(list(some))), default=math.inf)
        if worst(victims) > best:
            faults.append(f"a job is stopped for {head} that loses {worst(victims)}; {best} would do")
    return faults
