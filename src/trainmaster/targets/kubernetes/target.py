"""The Kubernetes target: apply the objects of an attempt, watch them, read logs, stop and delete.

One watch per namespace serves all attempts. Files come out of the pods through their logs and are put together in the
attempt's folder on this machine (spool.py), where they stay readable after the pods are gone. That folder also holds
three marks: `stop` (requested, also before the start), `end` (how it ended), `released` (nothing may start any more).
"""

from __future__ import annotations

import asyncio
import base64
import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.core.errors import TargetError, TrainmasterError
from trainmaster.core.plan import EXIT_FILE, OUTPUTS_FOLDER, ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.remote.attempt_host import check_range
from trainmaster.remote.members import SPARES, count_places
from trainmaster.targets import FileSize, Handle, NodeAccess, Owned, Placement, Poll, Submission
from trainmaster.targets._cluster_job import ClusterJob, PlannedClusterJob
from trainmaster.targets._node_files import find_stream, rename
from trainmaster.targets._spool import Spool
from trainmaster.targets.kubernetes import kueue, manifests, names, planning, spares
from trainmaster.targets.kubernetes.client import path_of
from trainmaster.targets.kubernetes.errors import Missing
from trainmaster.targets.kubernetes.kubeconfig import load_access
from trainmaster.targets.kubernetes.listing import list_objects
from trainmaster.targets.kubernetes.logs import start_of
from trainmaster.targets.kubernetes.session import Session, open_session
from trainmaster.targets.kubernetes.settings import Kind, Settings, load_settings, with_account
from trainmaster.targets.kubernetes.states import (
    find_end,
    find_queue,
    has_started,
    is_complete,
    judge,
    newest_by_node,
    stopped_early,
    trim_pod,
)

_STOP, _END, _RELEASED = "stop", "end", "released"
_MAX_WORK_BYTES = 900 << 10  # a ConfigMap holds 1 MiB
_GONE_S = 120.0
_UNREAD = "it is over; the logs of its pods cannot be read now"


class Kubernetes:
    """Runs attempts in pods of a cluster."""

    def __init__(self, path: Path | None, *, kind: Kind | None = None, user: str | None = None) -> None:
        self._path, self._kind, self._user = path, kind, user

    def plan(self, placement: Placement) -> Submission:
        return planning.plan(placement, self.settings())

    def count_nodes(self, handle: Handle) -> int:
        return int(handle["nodes"])

    async def submit(self, submission: Submission) -> Handle:
        handle = submission.handle
        session = self._session(handle)
        spool, submitted = session.spool(handle), {**handle, "submitted": True}
        if spool.find(_RELEASED) is not None or spool.find(_END) is not None:
            return submitted
        objects = planning.parse(submission)
        await self._send_files(session, submission, objects)
        for item in objects:
            if stop := spool.find(_STOP):
                for metadata in manifests.pod_metadata(item):
                    metadata.setdefault("annotations", {})[names.STOP_ANNOTATION] = stop
            queued = kueue.QUEUE_LABEL in (item["metadata"].get("labels") or {})
            if queued and await self._has_job(session, str(handle["name"]), str(handle["attempt"])):
                continue  # submitted before; `suspend` is Kueue's since then
            await session.client.apply(planning.reveal(item) if item["kind"] == "Secret" else item)
        if spool.find(_RELEASED) is not None:  # meanwhile
            await self._delete(session, handle)
        return submitted

    async def poll(self, handle: Handle) -> Poll:
        try:
            session = self._session(handle)
            spool = session.spool(handle)
            if (ended := spool.find(_END)) is not None:
                return Poll.from_json(ended)
            if spool.find(_RELEASED) is not None and handle.get("submitted"):
                return Poll(state=TargetState.LOST, note="it was ended by force")
            await session.ready()
            job = await session.find_job(str(handle["name"]))
            if job is None and not handle.get("submitted"):
                return Poll(state=TargetState.WAITING, note="not submitted yet")
            pods = session.pods_of(str(handle["attempt"]))
            why = ""
            if job is not None and find_queue(job) is not None:
                why = await session.why_queued(job)
            elif job is not None and len(pods) == 0:
                why = await session.why_no_pods(str(handle["name"]))
            result = await self._judge(session, job, handle, why=why)
            if not result.state.over and not handle.get("restarts"):
                result = _see_replaced(pods, spool, handle) or result
            if not result.state.over and job is not None and is_complete(job):
                result = await _see_removed(session, handle) or result
            ranked = spares.find_ranked(pods, handle, spool)  # a spare that stops ends no attempt
            reason = spool.find(_STOP) if result.state is TargetState.WAITING and not has_started(ranked) else None
            if reason is not None:
                result = stopped_early(str(handle["attempt"]), reason)
            if result.state.over:
                return await self._end(session, handle, result)
            if result.note != _UNREAD:
                session.go_on(handle)
            session.follow(handle)
            return result
        except TrainmasterError as error:
            return Poll(state=TargetState.UNKNOWN, note=str(error))

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        node, name = find_stream(
            stream, nodes=int(handle["nodes"]), ranks_per_node=int(handle.get("ranks_per_node", 1))
        )
        check_range(name, offset, limit)
        session = self._session(handle)
        spool = session.spool(handle)
        if handle.get("submitted") and spool.find(_END) is None and spool.find(_RELEASED) is None:
            await session.ready()
            session.follow(handle)
        if name.startswith(f"{OUTPUTS_FOLDER}/") and not spool.node(node).has(name):
            raise TargetError(f"kubernetes: {stream!r:.200} did not come out of the pod: no plain file, or too large")
        return spool.node(node).read(name, offset, limit)

    async def list_files(self, handle: Handle) -> list[FileSize]:
        spool, files = self._session(handle).spool(handle), []
        places = count_places(handle)
        for node in range(int(handle["nodes"])):
            files += [rename(file, node, nodes=places) for file in spool.node(node).list_files()]
        return sorted(files, key=lambda file: file.name)

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        session = self._session(handle)
        first_reason = session.spool(handle).mark(_STOP, reason)
        for pod in await session.list_pods(str(handle["attempt"])):
            notes = pod["metadata"].get("annotations") or {}
            if names.STOP_ANNOTATION not in notes:
                path = path_of("v1", "pods", namespace=session.namespace, name=pod["metadata"]["name"])
                await session.client.merge(path, {"metadata": {"annotations": {names.STOP_ANNOTATION: first_reason}}})

    async def release(self, handle: Handle) -> None:
        session = self._session(handle)
        if "folder" in handle:
            spool = session.spool(handle)
            if not handle.get("submitted") and await self._is_absent(session, handle):
                if spool.folder.exists():
                    spool.mark(_RELEASED, "")
                # The cluster may have refused the job alone: its plan, secrets and service were created before it.
                await self._delete(session, handle)
                return
            spool.mark(_RELEASED, "")
            await session.ready()
            await session.drain(handle, last=True)
        await self._delete(session, handle)

    async def list_owned(self, *, partial: bool = False) -> list[Owned]:  # noqa: ARG002 (one namespace: all or nothing)
        settings = self.settings()
        return await list_objects(load_access(settings.kubeconfig, settings.context), settings)

    def open_nodes(self, *, limit_s: float, home: Path, retest: bool = False) -> NodeAccess:  # noqa: ARG002 (always)
        from trainmaster.targets.kubernetes.nodes import KubeNodes

        return KubeNodes(self, self.settings(), limit_s=limit_s, home=home)

    async def plan_cluster_job(self, job: ClusterJob, *, home: Path, folder: Path) -> PlannedClusterJob:
        from trainmaster.targets.kubernetes import cluster_job

        return await cluster_job.plan(self, self.settings(), job, home=home, folder=folder)

    def settings(self) -> Settings:
        """Settings of the file, read again: a server picks up changes."""
        return with_account(load_settings(self._path, kind=self._kind), self._user)

    def _session(self, handle: Handle) -> Session:
        settings = self.settings()
        access = load_access(settings.kubeconfig, settings.context)
        return open_session(access, str(handle["namespace"]), str(handle["kind"]))

    async def _judge(self, session: Session, job: Any, handle: Handle, *, why: str) -> Poll:
        """What job and pods say."""
        pods, spool = session.pods_of(str(handle["attempt"])), session.spool(handle)
        not_ready = await self._not_ready(session, pods)
        if SPARES not in handle:
            return judge(job, pods, handle, not_ready=not_ready, why=why)
        ended_s = session.ended_s(handle)
        result = spares.judge(job, pods, handle, spool=spool, not_ready=not_ready, ended_s=ended_s, why=why)
        is_sure = result.state is TargetState.SUCCEEDED or spares.is_over(job, pods, handle, not_ready=not_ready)
        if not result.state.over or is_sure:
            return result
        # A spare may have taken a place since the log of node 0 was last read, as after an outage of this server.
        if not await session.read_first(handle):
            return Poll(state=TargetState.RUNNING, note=_UNREAD)
        return spares.judge(job, pods, handle, spool=spool, not_ready=not_ready, ended_s=ended_s, why=why)

    async def _not_ready(self, session: Session, pods: Any) -> frozenset[str]:
        """Nodes without contact; asked only where a pod shows that something is wrong with its node."""
        doubtful = any(
            pod["metadata"].get("deletionTimestamp")
            or any(
                condition.get("type") == "Ready" and condition.get("status") != "True"
                for condition in pod["status"]["conditions"] or ()
            )
            for pod in pods
            if pod["spec"].get("nodeName")
        )
        return await session.not_ready() if doubtful else frozenset()

    async def _end(self, session: Session, handle: Handle, poll: Poll) -> Poll:
        """The last state of an attempt, written down after its logs were read."""
        if not await session.drain(handle, last=poll.state is TargetState.LOST):
            return Poll(state=TargetState.RUNNING, note=_UNREAD)
        spool = session.spool(handle)
        if poll.exit is not None:
            for node in range(int(handle["nodes"])):
                node_spool = spool.node(node)
                raw = node_spool.read(EXIT_FILE, node_spool.newest_base(EXIT_FILE), 1 << 20)
                whole = ExitRecord.read(raw, attempt=str(handle["attempt"])) if raw else None
                if whole is not None and (whole.ended_at, whole.reason) == (poll.exit.ended_at, poll.exit.reason):
                    poll = replace(poll, exit=whole, note=whole.message)  # with its evidence
                    break
        if spool.find(_RELEASED) is not None:
            return poll
        return Poll.from_json(spool.mark(_END, poll.to_json()))

    async def _is_absent(self, session: Session, handle: Handle) -> bool:
        try:
            await session.client.get(session.job_path(str(handle["name"])))
            return False
        except Missing:
            return not await session.list_pods(str(handle["attempt"]))

    async def _delete(self, session: Session, handle: Handle) -> None:
        """Delete everything of the attempt; return when no pod is left."""
        attempt, name = str(handle["attempt"]), str(handle["name"])
        selector = f"{names.ATTEMPT_LABEL}={attempt}"
        is_own_name = name == names.object_name(attempt)
        if is_own_name or await self._has_job(session, name, attempt):
            await _missing_is_fine(session.client.delete(session.job_path(name)))
        if is_own_name and handle["kind"] == "job":
            if SPARES in handle or "folder" not in handle:  # listed without a database: it may have had them
                await self._delete_nodes(session, attempt)
            # services have no deletecollection in older servers
            await _missing_is_fine(
                session.client.delete(path_of("v1", "services", namespace=session.namespace, name=name))
            )
        for plural in ("configmaps", "secrets"):
            path = path_of("v1", plural, namespace=session.namespace)
            await _missing_is_fine(session.client.delete(path, labelSelector=selector))
        async with asyncio.timeout(_GONE_S):
            while pods := await session.list_pods(attempt):
                lost = await session.not_ready()
                for pod in pods:
                    # A kubelet confirms the end of a pod; without contact it does so when it is back.
                    grace_s = 0 if (pod["spec"].get("nodeName") or "") in lost or _is_over(pod, attempt) else 1
                    path = path_of("v1", "pods", namespace=session.namespace, name=pod["metadata"]["name"])
                    await _missing_is_fine(session.client.delete(path, grace_s=grace_s))
                await asyncio.sleep(0.2)

    async def _delete_nodes(self, session: Session, attempt: str) -> None:
        """Delete the Jobs of single nodes, which an attempt with spares has."""
        path = path_of(session.resource.api, session.resource.plural, namespace=session.namespace)
        selector = f"{names.ATTEMPT_LABEL}={attempt},{names.NODE_LABEL}"
        for job in (await session.client.list(path, labelSelector=selector)).get("items") or ():
            await _missing_is_fine(session.client.delete(session.job_path(str(job["metadata"]["name"]))))

    async def _has_job(self, session: Session, name: str, attempt: str) -> bool:
        """Whether the job of that name is the attempt's: a manifest's own name may be taken by another's job."""
        try:
            job = await session.client.get(session.job_path(name))
        except Missing:
            return False
        return bool((job["metadata"].get("labels") or {}).get(names.ATTEMPT_LABEL) == attempt)

    async def _send_files(self, session: Session, submission: Submission, objects: list[Any]) -> None:
        """The node half and the working folder, as ConfigMaps."""
        settings = self.settings()
        if settings.package == "send":
            await session.send_package()
        if submission.work is not None:
            plan = next(item for item in objects if item["kind"] == "ConfigMap")
            packed = await asyncio.to_thread(pack_work, submission.work)
            plan["binaryData"] = {"work.tar.gz": base64.b64encode(packed).decode()}


def _see_replaced(pods: Any, spool: Spool, handle: Handle) -> Poll | None:
    """`lost` where another pod wrote before: the first one was deleted while nobody looked."""
    for node, pod in newest_by_node(pods, int(handle["nodes"])).items():
        began = spares.is_needed(node, handle) and pod["status"].get("containerStatuses")
        if began and not spool.node(node).is_first(start_of(pod)):
            text = f"the pod of node {node} was ended by the cluster, and pod {pod['metadata']['name']} took its place"
            return Poll(state=TargetState.LOST, reason=Reason.PREEMPTED, note=text)
    return None


async def _see_removed(session: Session, handle: Handle) -> Poll | None:
    """`lost` where a job is complete and pods of it were removed before their records were seen. The server is asked:
    the watch of pods may be behind that of jobs."""
    listed, nodes = [trim_pod(pod) for pod in await session.list_pods(str(handle["attempt"]))], int(handle["nodes"])
    found = newest_by_node(listed, nodes)
    if all(node in found for node in range(nodes) if spares.is_needed(node, handle)):
        return None
    text = "the cluster has completed the job, and its pods were removed before their exit records were read"
    return Poll(state=TargetState.LOST, note=text)


def _is_over(pod: Any, attempt: str) -> bool:
    return pod["status"].get("phase") == "Pending" or find_end(trim_pod(pod), 0, attempt) is not None


def pack_work(folder: Path) -> bytes:
    """A working folder as an archive; TargetError where it does not fit into a ConfigMap."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    if packed.tell() > _MAX_WORK_BYTES:
        raise TargetError(
            f"kubernetes: the working folder has {packed.tell():,} bytes packed, {_MAX_WORK_BYTES:,} fit into a "
            "ConfigMap; name large files in .trainmasterignore, or put them on a volume and write workdir: /path"
        )
    return packed.getvalue()


async def _missing_is_fine(request: Any) -> None:
    try:
        await request
    except Missing:
        return
