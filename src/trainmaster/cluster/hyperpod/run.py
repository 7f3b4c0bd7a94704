"""One test: deploy, wait for the pods, watch, read the checkpoint back, judge, remove."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainmaster import targets
from trainmaster.cluster.hyperpod import fit, objects, pods
from trainmaster.cluster.hyperpod.clock import Clock, WallClock
from trainmaster.cluster.hyperpod.helper import reading_pod
from trainmaster.cluster.hyperpod.indicators import START_LIMIT_S, Measurements, judge
from trainmaster.cluster.hyperpod.logs import PodLog
from trainmaster.cluster.hyperpod.manifest import JOB_NAME, bandwidth_job, count_pods, find_checked_job, uses_efa
from trainmaster.cluster.hyperpod.status import list_nodes
from trainmaster.core.errors import TrainmasterError, Unreachable
from trainmaster.core.results import CheckResult, Overall
from trainmaster.targets.kubernetes import names
from trainmaster.targets.kubernetes.client import Client, path_of, path_of_object
from trainmaster.targets.kubernetes.errors import Missing
from trainmaster.targets.kubernetes.logs import LogReader
from trainmaster.targets.kubernetes.pods import Object
from trainmaster.targets.kubernetes.states import SUCCEEDED, is_ready

_READ_LIMIT_S = 900.0  # where plan states none: 96 GB of an 8B model with its optimizer state, at 107 MB/s or more
_NETWORK_LIMIT_S = 180.0
_LAST_READINGS = 3  # of a log that could not be read at the end
_EARLY_S = 2.0  # a start is known to the second
_FIRST_LOSS_S = 300.0  # from the start of the last pod: imports, NCCL, compiling, the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPlan:
    """What to test, and for how long."""

    manifest: list[Object]
    namespace: str
    home: Path  # whose mark the objects carry
    planned: Sequence[str]
    monitor_s: float  # from the first loss on
    stretch: bool = False  # watch longer where `plan` says that the indicators need it
    clock: Clock = field(default_factory=WallClock)
    read_limit_s: float = _READ_LIMIT_S
    job_name: str = JOB_NAME
    baseline_tokens_per_s: float | None = None
    start_limit_s: float = START_LIMIT_S
    look_s: float = 2.0


@dataclass(kw_only=True)
class Outcome:
    """Verdicts, and what was removed."""

    overall: Overall
    results: list[CheckResult]
    measured: Measurements
    removed: list[str] = field(default_factory=list)


async def run(client: Client, plan: TestPlan, tell: Callable[[str], None]) -> Outcome:
    """Run a test. Whatever ends it, its objects are removed; after SIGKILL, by the next test, `cleanup` or `reap`."""
    owner = targets.Run(plan.home)
    try:
        return await _run(client, plan, objects.make_marks(plan.job_name, owner), tell)
    finally:
        owner.close()


async def _run(client: Client, plan: TestPlan, marks: Mapping[str, str], tell: Callable[[str], None]) -> Outcome:
    plan = await _fit(client, plan, tell)
    test, removed = _Test(client, plan, marks, tell), []
    made = objects.prepare(plan.manifest, plan.namespace, marks)
    for path in await objects.clear_leftovers(client, plan.namespace, plan.job_name, plan.home):
        tell(f"removed what an earlier test left: {path.rpartition('/')[2]}")
    try:
        await test.find_unready_nodes()
        await objects.create(client, made)
        tell(f"deployed {plan.job_name}: {test.measured.pods_wanted} pods")
        if await test.wait_for_pods():
            await test.watch()
        await test.find_unready_nodes()
        removed = await test.remove()
        await test.read_checkpoint()
        await test.measure_network()
    finally:
        removed += await test.remove()
        tell(f"removed {len(removed)} objects of the test")
    results, overall = judge(test.finish(), plan.planned)
    return Outcome(overall=overall, results=results, measured=test.measured, removed=removed)


async def fit_manifest(client: Client, manifest: list[Object], *, ends: bool) -> fit.Fit:
    """The manifest for the nodes of this cluster; as it is where they cannot be seen. `ends`: as in `fit.fit`."""
    try:
        nodes = await list_nodes(client)
    except TrainmasterError:  # no right to see nodes
        nodes = []
    return fit.fit(manifest, fit.find([node for node in nodes if is_ready(node)] or nodes), ends=ends)


async def _fit(client: Client, plan: TestPlan, tell: Callable[[str], None]) -> TestPlan:
    fitted = await fit_manifest(client, plan.manifest, ends=True)
    if fitted.note:
        tell(fitted.note)
    if fitted.budget is None:
        return replace(plan, manifest=fitted.objects)
    least_s = fitted.budget.watch_s(plan.planned)
    if plan.stretch and least_s > plan.monitor_s:
        tell(f"watching for {least_s:.0f} s, not {plan.monitor_s:.0f}: by plan the indicators take that long")
        plan = replace(plan, monitor_s=least_s)
    return replace(plan, manifest=fitted.objects, read_limit_s=fitted.budget.read_s)


class _Test:
    """State of a test between its steps."""

    def __init__(self, client: Client, plan: TestPlan, marks: Mapping[str, str], tell: Callable[[str], None]) -> None:
        job = find_checked_job(plan.manifest)
        self._client, self._plan, self._tell, self._job = client, plan, tell, job
        self._marks, self._attempt = marks, marks[names.ATTEMPT_LABEL]
        self.measured = Measurements(
            pods_wanted=count_pods(job), efa=uses_efa(job), baseline_tokens_per_s=plan.baseline_tokens_per_s
        )
        self._logs: dict[str, PodLog] = {}
        self._network: dict[str, PodLog] = {}
        self._readers: dict[str, LogReader] = {}
        self._pods: list[Object] = []
        self._gpus: list[float] = []
        self._restarts: dict[tuple[str, str], pods.Restart] = {}

    async def remove(self) -> list[str]:
        """Delete the objects of this test, and no others."""
        return await objects.remove(self._client, self._plan.namespace, self._plan.job_name, attempt=self._attempt)

    async def find_unready_nodes(self) -> None:
        """Nodes without the condition Ready: at the beginning and at the end."""
        self.measured.nodes = 0
        with contextlib.suppress(TrainmasterError):  # no right to see nodes: not measured
            nodes = await list_nodes(self._client)
            names = [str(node["metadata"]["name"]) for node in nodes if not is_ready(node)]
            self.measured.nodes = len(nodes)
            self.measured.not_ready_nodes = sorted({*self.measured.not_ready_nodes, *names})

    async def wait_for_pods(self) -> bool:
        """Wait until all pods run; False where they will not, or not in time."""
        begin, shown = self._now(), -1
        while True:
            running = await self._update_pods()
            if running != shown:
                self._tell(f"{running} of {self.measured.pods_wanted} pods running")
                shown = running
            after = self._now() - begin
            if running >= self.measured.pods_wanted:
                self.measured.running_after_s = after
                return True
            if self.measured.pod_faults or after > self._plan.start_limit_s:
                return False
            await self._plan.clock.sleep(min(self._plan.look_s, 1.0))

    async def watch(self) -> None:
        """Read logs and pods for the given time from the first loss on; end early with the job or a fault of a pod."""
        begin, until, next_gpus = self._now(), math.inf, 0.0
        while True:
            over = self._now() >= until or await self._is_complete()
            await self._update_pods()
            await self._read_logs()
            if until == math.inf and (self._has_begun() or self._now() - begin >= _FIRST_LOSS_S):
                until = self._now() + self._plan.monitor_s
            if until < math.inf and self._now() >= next_gpus:  # before the first step GPUs have nothing to do
                await self._sample_gpus()
                next_gpus = self._now() + max(5.0, self._plan.monitor_s / 20)
            if over or self.measured.pod_faults:
                for _ in range(_LAST_READINGS):
                    if all(log.whole for log in self._logs.values()):
                        return
                    await self._plan.clock.sleep(self._plan.look_s)
                    await self._read_logs()
                return
            await self._plan.clock.sleep(min(self._plan.look_s, max(0.05, until - self._now())))

    async def _sample_gpus(self) -> None:
        if "gpu_utilisation" in self._plan.planned:
            self._gpus += await pods.sample_gpus(self._client, self._plan.namespace, self._pods)

    def _has_begun(self) -> bool:
        """Whether there is a loss, or an error that there will be none after."""
        return any(log.first_loss_at or log.nccl_timeouts or log.faults for log in self._logs.values())

    def _now(self) -> float:
        return self._plan.clock.now()

    async def read_checkpoint(self) -> None:
        """Read the newest checkpoint in a pod of its own and remove the test's folder.

        Every file is read with its digest where a checkpoint is judged; else sizes alone, since a minute's test is not
        to read 96 GB. The job has been removed before: a running one deletes old checkpoints.
        """
        written = [path for log in self._logs.values() for path in log.checkpoints]
        if not written:
            return
        self.measured.checkpoint = written[-1]
        self._tell(f"reading {written[-1]} back")
        plan, folder = self._plan, objects.checkpoint_folder(self._marks[names.RUN_LABEL])
        deep = "checkpoint" in plan.planned
        pod = reading_pod(self._job, plan.job_name, plan.namespace, written[-1], folder=folder, deep=deep)
        await objects.create(self._client, [objects.mark(pod, plan.namespace, self._marks)])
        path = path_of("v1", "pods", namespace=self._plan.namespace, name=pod["metadata"]["name"])
        until = self._now() + plan.read_limit_s
        while self._now() < until:
            phase = (await self._client.get(path)).get("status", {}).get("phase")
            if phase in ("Succeeded", "Failed"):
                with contextlib.suppress(Unreachable):  # the log is there for the next look
                    self.measured.checkpoint_fault = await self._read_answer(pod)
                    return
            await plan.clock.sleep(plan.look_s)

    async def measure_network(self) -> None:
        """All-reduce between the pods, as a job of its own with the training job's image and devices."""
        made, plan = bandwidth_job(self._plan.manifest), self._plan
        if "network" not in plan.planned or made is None or self.measured.running_after_s is None:
            return
        if self.measured.pods_wanted == 1 or self.measured.pod_faults:
            return
        await self.remove()
        self._tell("measuring the network with an all-reduce between the pods")
        lasts_s = plan.start_limit_s + _NETWORK_LIMIT_S
        await objects.create(self._client, objects.prepare(made, plan.namespace, self._marks))
        readers: dict[str, LogReader] = {}
        logs: dict[str, PodLog] = {}
        until = self._now() + lasts_s
        while self._now() < until and not any(log.bandwidth_over for log in logs.values()):
            listed = await self._list_pods()
            for pod in listed:
                name = str(pod["metadata"]["name"])
                reader = readers.setdefault(name, LogReader(self._client, plan.namespace, pod))
                await pods.collect(reader, logs.setdefault(name, PodLog()))
            if any(map(pods.find_fault, listed)):
                break
            await plan.clock.sleep(min(plan.look_s, 1.0))
        self._network = logs

    def finish(self) -> Measurements:
        """The measurements that follow from the whole logs."""
        measured, logs = self.measured, self._logs
        measured.logs = dict(logs)
        after, word = self._nccl_time()
        measured.nccl_after_s, measured.nccl_from = after, word
        measured.gpu_percent = statistics.fmean(self._gpus) if self._gpus else None
        swept = [*self._network.values(), *logs.values()]
        speeds = [speed for log in swept for speed in log.busbw_gb_s]
        measured.network_gbps = 8 * max(speeds) if speeds else None
        measured.network_fault = next((line for log in swept for line in (*log.nccl_timeouts, *log.faults)), "")
        measured.wrong_rows = [row for log in swept for row in log.wrong_rows]
        used = [log.memory_gib for log in logs.values() if log.memory_gib is not None]
        measured.gpu_memory_gib = max(used, default=None)
        rates: list[list[float]] = [log.tokens_per_s for log in logs.values() if log.tokens_per_s]
        measured.tokens_per_s = statistics.median(sorted(rates, key=len)[-1]) if rates else None
        return measured

    def _nccl_time(self) -> tuple[float | None, str]:
        """Longest time from the start of a pod to NCCL's own line, else to the first loss, which comes after it."""
        times, word = [], "NCCL's log"
        if len(self._pods) < self.measured.pods_wanted:
            return None, ""
        for pod in self._pods:
            log, begin = self._logs.get(str(pod["metadata"]["name"])), pods.started_at(pod)
            if log is None or begin is None:
                return None, ""
            ready = log.nccl_ready_at
            if ready is None:
                ready, word = log.first_loss_at, "the first loss"
            if ready is None:
                return None, ""
            after = (ready - begin).total_seconds()
            if after < -_EARLY_S:  # the line of an earlier start of this container
                return None, ""
            times.append(max(0.0, after))
        return max(times, default=None), word

    async def _update_pods(self) -> int:
        self._pods = await self._list_pods()
        faults = {str(pod["metadata"]["name"]): pods.find_fault(pod) for pod in self._pods}
        self.measured.pod_faults = {**self.measured.pod_faults, **{name: why for name, why in faults.items() if why}}
        for restart in [restart for pod in self._pods for restart in pods.find_restarts(pod)]:
            self._restarts[restart.pod, restart.container] = restart
        self.measured.restarts = list(self._restarts.values())
        running = sum(map(pods.is_running, self._pods))
        self.measured.pods_running = max(self.measured.pods_running, running)
        return running

    async def _list_pods(self) -> list[Object]:
        """Pods of this test: another job's can have the same label `job-name`, as a plain Job's of this name have."""
        plan = self._plan
        return await pods.list_pods(
            self._client, plan.namespace, plan.job_name, selector=f"{names.ATTEMPT_LABEL}={self._attempt}"
        )

    async def _read_logs(self) -> None:
        for pod in self._pods:
            name = str(pod["metadata"]["name"])
            reader = self._readers.setdefault(name, LogReader(self._client, self._plan.namespace, pod))
            await pods.collect(reader, self._logs.setdefault(name, PodLog()))

    async def _read_answer(self, pod: Object) -> str | None:
        lines = [line async for line in LogReader(self._client, self._plan.namespace, pod).read()]
        for line in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return str(json.loads(line.partition(b" ")[2])["fault"])
        return None

    async def _is_complete(self) -> bool:
        place = {**self._job, "metadata": {**self._job["metadata"], "namespace": self._plan.namespace}}
        try:
            job = await self._client.get(path_of_object(place))
        except Missing:
            return False
        conditions = (job.get("status") or {}).get("conditions") or ()
        return any(condition.get("type") in SUCCEEDED and condition.get("status") == "True" for condition in conditions)
