"""The order of the queue: priority with ageing, then the project that has least of its share, then who came first."""

from __future__ import annotations

import heapq
from collections import defaultdict

from trainmaster.queueing.state import Kind, Share, State, Waiting


class Usage:
    """Devices that each project holds, and its dominant share: the larger of its parts of all GPUs and of all slots."""

    def __init__(self, state: State) -> None:
        self._held: dict[tuple[str, str], int] = defaultdict(int)
        self._all = {
            "gpu": sum(len(machine.gpus) for machine in state.machines),
            "slot": sum(len(machine.slots) for machine in state.machines),
        }
        self._shares = state.shares
        for job in state.running:
            self.add(job.project, job.kind, sum(map(len, job.devices.values())))

    def add(self, project: str, kind: Kind, devices: int) -> None:
        self._held[project, kind] += devices

    def of(self, project: str, kind: Kind) -> int:
        return self._held[project, kind]

    def dominant(self, project: str) -> float:
        """Part of the machines that a project has, divided by its weight."""
        weight = self._shares.get(project, Share()).weight
        return max(self._held[project, kind] / total if total else 0.0 for kind, total in self._all.items()) / weight


def level(job: Waiting, state: State) -> int:
    """Priority of a job with its age: one more for each `age_s` that it has waited."""
    return job.priority + int(max(0.0, state.now_s - job.since_s) // state.rules.age_s)


class Order:
    """Waiting jobs, each once. What a job is given moves the later jobs of its project back within their level."""

    def __init__(self, state: State, usage: Usage) -> None:
        self._usage = usage
        queues: dict[int, dict[str, list[Waiting]]] = defaultdict(lambda: defaultdict(list))
        for job in sorted(state.waiting, key=lambda job: (job.since_s, job.job), reverse=True):
            queues[level(job, state)][job.project].append(job)
        self._levels = sorted(queues.items())  # the highest last
        self._heap: list[tuple[float, float, str, str]] = []
        self._queues: dict[str, list[Waiting]] = {}

    def next(self) -> Waiting | None:
        """The next job; the one before it has been decided."""
        if not self._heap:
            if not self._levels:
                return None
            _, self._queues = self._levels.pop()
            for project in self._queues:
                self._push(project)
        while True:
            share, _, _, project = heapq.heappop(self._heap)
            if share == self._usage.dominant(project):
                break
            self._push(project)  # it was given something since
        job = self._queues[project].pop()
        if self._queues[project]:
            self._push(project)
        return job

    def _push(self, project: str) -> None:
        job = self._queues[project][-1]
        heapq.heappush(self._heap, (self._usage.dominant(project), job.since_s, job.job, project))
