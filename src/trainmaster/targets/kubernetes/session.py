"""One connection, one watch of jobs and one of pods per cluster and event loop, shared by all attempts there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.core.errors import TrainmasterError
from trainmaster.core.plan import MEMBERS_LOG
from trainmaster.remote.members import SPARES
from trainmaster.targets import Handle
from trainmaster.targets._spool import Spool
from trainmaster.targets.kubernetes import kueue, names, planning
from trainmaster.targets.kubernetes.client import Client, Object, path_of
from trainmaster.targets.kubernetes.errors import Denied, Missing, Taken
from trainmaster.targets.kubernetes.kubeconfig import Access
from trainmaster.targets.kubernetes.logs import PodLog, start_of
from trainmaster.targets.kubernetes.manifests import RESOURCES
from trainmaster.targets.kubernetes.pending import explain_events
from trainmaster.targets.kubernetes.spares import read_members
from trainmaster.targets.kubernetes.states import find_end, has_started, is_ready, node_rank, trim_job, trim_pod
from trainmaster.targets.kubernetes.watch import Watch

_SESSIONS: dict[tuple[int, Access, str, str], Session] = {}
# Not of a session: after new credentials a second one reads the same logs, and each byte is still written once.
_SPOOLS: dict[tuple[int, Path], Spool] = {}
_EVENTS_S = 5.0  # events of a job without pods are asked for at most so often
_NODES_S = 3.0
_LAST_LINES_S = 120.0  # so long the logs of ended pods are asked for again


class Session:
    """A namespace of a cluster, for one kind of job."""

    def __init__(self, access: Access, namespace: str, kind: str) -> None:
        self.client, self.namespace = Client(access), namespace
        self.resource = RESOURCES[kind]  # type: ignore[index]  # a kind of Settings
        jobs = path_of(self.resource.api, self.resource.plural, namespace=namespace)
        pods = path_of("v1", "pods", namespace=namespace)
        self.jobs = Watch(self.client, jobs, trim=trim_job, label=names.ATTEMPT_LABEL, labelSelector=names.SELECTOR)
        self.pods = Watch(self.client, pods, trim=trim_pod, label=names.ATTEMPT_LABEL, labelSelector=names.SELECTOR)
        self._logs: dict[str, PodLog] = {}
        self._over: dict[str, float] = {}  # attempt → since when its last lines are waited for
        self._ended: dict[str, dict[str, float]] = {}  # attempt → start of a container → when its end was seen first
        self._has_package = False
        self._workloads: Watch | None = None  # of Kueue; made when a job waits in a queue of it
        self._why: dict[str, tuple[float, str]] = {}
        self._not_ready: tuple[float, frozenset[str]] = (0.0, frozenset())

    async def ready(self) -> None:
        await self.jobs.ready()
        await self.pods.ready()

    async def close(self) -> None:
        for log in self._logs.values():
            await log.close()
        await self.jobs.close()
        await self.pods.close()
        if self._workloads is not None:
            await self._workloads.close()
        await self.client.close()

    async def send_package(self) -> None:
        """Bring the node half to the namespace, once; its name is the hash of its content."""
        if not self._has_package:
            with contextlib.suppress(Taken):
                path = path_of("v1", "configmaps", namespace=self.namespace)
                await self.client.post(path, planning.package_map(self.namespace))
            self._has_package = True

    def job_path(self, name: str) -> str:
        return path_of(self.resource.api, self.resource.plural, namespace=self.namespace, name=name)

    def pods_of(self, attempt: str) -> list[Mapping[str, Any]]:
        return self.pods.marked(attempt)

    async def find_job(self, name: str) -> Mapping[str, Any] | None:
        """The job; one that the watch does not know is asked for: it may be newer than the watch."""
        known = self.jobs.objects.get(name)
        if known is not None:
            return dict(known)
        try:
            return trim_job(await self.client.get(self.job_path(name)))
        except Missing:
            return None

    async def why_queued(self, job: Mapping[str, Any]) -> str:
        """Kueue's reason why a suspended job waits; empty where the account may not see it."""
        try:
            if self._workloads is None:
                group = await self.client.get(f"/apis/{kueue.GROUP}")
                path = path_of(str(group["preferredVersion"]["groupVersion"]), "workloads", namespace=self.namespace)
                self._workloads = Watch(self.client, path, trim=kueue.trim_workload, label=kueue.JOB_LABEL)
            await self._workloads.ready()
        except Missing:
            return f"the cluster has no Kueue ({kueue.GROUP}), so nothing admits it; install it, or name no queue"
        except Denied as error:
            return f"its reason cannot be read: {error}"
        return kueue.explain(self._workloads.marked(str(job["metadata"]["uid"])))

    async def why_no_pods(self, name: str) -> str:
        """The newest warning about a job that has no pods."""
        when, text = self._why.get(name, (0.0, ""))
        if time.monotonic() - when > _EVENTS_S:
            selector = f"involvedObject.name={name}"
            try:
                path = path_of("v1", "events", namespace=self.namespace)
                listed = await self.client.list(path, fieldSelector=selector, limit="50")
                text = explain_events(listed.get("items") or ())
            except (Denied, Missing):
                text = ""
            self._why[name] = (time.monotonic(), text)
        return text

    async def not_ready(self) -> frozenset[str]:
        """Nodes without contact. Empty where the account may not list nodes."""
        when, names = self._not_ready
        if time.monotonic() - when > _NODES_S:
            try:
                listed = await self.client.list("/api/v1/nodes")
                names = frozenset(node["metadata"]["name"] for node in listed.get("items") or () if not is_ready(node))
            except Denied:
                names = frozenset()
            self._not_ready = (time.monotonic(), names)
        return names

    def spool(self, handle: Handle) -> Spool:
        folder = Path(str(handle["folder"])) / "kubernetes"
        key = (id(asyncio.get_running_loop()), folder)
        if key not in _SPOOLS:
            _SPOOLS[key] = Spool(folder)
        return _SPOOLS[key]

    def follow(self, handle: Handle) -> None:
        """Copy the logs of an attempt's pods from now on."""
        before: dict[int, PodLog] = {}  # node → its pod before
        for pod in self._oldest_first(handle):  # a later one writes after the end of an earlier one
            if pod["status"].get("containerStatuses"):
                log, node = self._log(pod, handle), node_rank(pod, int(handle["nodes"]))
                log.follow(after=before.get(node))
                before[node] = log

    async def drain(self, handle: Handle, *, last: bool = False) -> bool:
        """Copy the logs of an attempt's pods to their end. False: one cannot be read now, and may be later.

        `last`: what cannot be read now is given up, as it is after a time.
        """
        since = self._over.setdefault(str(handle["attempt"]), time.monotonic())
        last, whole = last or time.monotonic() - since > _LAST_LINES_S, True
        for pod in self._oldest_first(handle):
            log = self._log(pod, handle)
            if await log.drain() or last or await self._has_spare(pod, handle):
                self._logs.pop(log.start, None)
            else:
                whole = False
        if not whole:
            return False
        self.go_on(handle)
        self._ended.pop(str(handle["attempt"]), None)
        for number in range(int(handle["nodes"])):
            self.spool(handle).node(number).close_gaps()
        return True

    async def read_first(self, handle: Handle) -> bool:
        """Copy what node 0 has written up to now, with its last word on who has which place.

        False: that cannot be read now, and may be later. Node 0 repeats it: it comes again after a rotation.
        """
        since, whole = self._over.setdefault(_first_of(handle), time.monotonic()), True
        for pod in self._oldest_first(handle):
            if node_rank(pod, int(handle["nodes"])) == 0 and has_started([pod]):
                whole = await self._log(pod, handle).hear(MEMBERS_LOG) and whole
        if whole:
            self._over.pop(_first_of(handle), None)
        return whole or time.monotonic() - since > _LAST_LINES_S

    def go_on(self, handle: Handle) -> None:
        """The attempt is not over: its last lines are not waited for, and later have the whole time for it."""
        for key in (str(handle["attempt"]), _first_of(handle)):
            self._over.pop(key, None)

    def ended_s(self, handle: Handle) -> Mapping[str, float]:
        """Seconds since each end of a container was seen here first: the clocks of nodes differ."""
        attempt, now = str(handle["attempt"]), time.monotonic()
        seen = self._ended.setdefault(attempt, {})
        for pod in self.pods_of(attempt):
            if find_end(pod, 0, attempt) is not None:
                seen.setdefault(start_of(pod), now)
        return {start: now - at for start, at in seen.items()}

    def _oldest_first(self, handle: Handle) -> list[Mapping[str, Any]]:
        pods = self.pods_of(str(handle["attempt"]))
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    async def _has_spare(self, pod: Mapping[str, Any], handle: Handle) -> bool:
        """Whether a pod is on a node without contact, and the attempt went on without it: nothing waits for its log."""
        if SPARES not in handle or node_rank(pod, int(handle["nodes"])) in read_members(self.spool(handle), handle):
            return False
        return pod["spec"].get("nodeName") in await self.not_ready()

    def _log(self, pod: Mapping[str, Any], handle: Handle) -> PodLog:
        start = start_of(pod)
        if start not in self._logs:
            spool = self.spool(handle).node(node_rank(pod, int(handle["nodes"])))
            self._logs[start] = PodLog(self.client, self.namespace, pod, spool)
        return self._logs[start]

    async def list_pods(self, attempt: str) -> list[Object]:
        """Pods of an attempt as the server lists them now."""
        path = path_of("v1", "pods", namespace=self.namespace)
        listed = await self.client.list(path, labelSelector=f"{names.ATTEMPT_LABEL}={attempt}")
        return list(listed.get("items") or ())


def _first_of(handle: Handle) -> str:
    """Key of the wait for the log of node 0."""
    return f"{handle['attempt']}/0"


def open_session(access: Access, namespace: str, kind: str) -> Session:
    """The session of this event loop."""
    key = (id(asyncio.get_running_loop()), access, namespace, kind)
    if key not in _SESSIONS:
        _SESSIONS[key] = Session(access, namespace, kind)
    return _SESSIONS[key]


async def close_all() -> None:
    """Close what this event loop has open."""
    own = id(asyncio.get_running_loop())
    for key in [key for key in _SESSIONS if key[0] == own]:
        session = _SESSIONS.pop(key)
        try:
            await session.close()
        except TrainmasterError:
            continue
    for spool in [spool for spool in _SPOOLS if spool[0] == own]:
        del _SPOOLS[spool]
